"""Means of a feature that tables of both poolings look up, where all are sharded by rows.

TorchRec makes means from sums that have arrived. Its divisors are by feature. If a table with sum
pooling has the feature, they are 1 at the place of the feature's first lookup. So the mean stays a
sum, or the sum becomes a mean, by the order of the tables.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

_EPSILON = 1e-6  # TorchRec's, which keeps empty bags from a division by 0


class Misdivided(NamedTuple):
    """Embeddings for which TorchRec's divisor is wrong.

    Attributes:
        means: embeddings that have to be divided, by name, and their features.
        sums: embeddings that have to stay sums, by name.
    """

    means: dict[str, str]
    sums: list[str]


def find_misdivided(
    tables: Iterable[Any], features: Sequence[str], names: Sequence[str]
) -> Misdivided:
    """Returns the embeddings that TorchRec gets wrong.

    Args:
        tables: EmbeddingBagConfig of each table that is sharded by rows.
        features: feature of each lookup, in the order of the shardings.
        names: names of the embeddings, in the order of the output.
    """
    pooled: dict[PoolingType, set[str]] = {PoolingType.SUM: set(), PoolingType.MEAN: set()}
    named = {}
    for table in tables:
        pooled[table.pooling].update(table.feature_names)
        # A feature that is looked up in several tables is named so.
        named.update(
            {f"{each}@{table.name}": (each, table.pooling) for each in table.feature_names}
        )
    of_both = pooled[PoolingType.SUM] & pooled[PoolingType.MEAN]
    means, sums = {}, []
    for place, name in enumerate(names):
        feature, pooling = named.get(name, ("", None))
        if feature not in of_both:
            continue
        undivided = len(names) != len(features) or place == features.index(feature)
        if pooling == PoolingType.MEAN and undivided:
            means[name] = feature
        elif pooling == PoolingType.SUM and not undivided:
            sums.append(name)
    return Misdivided(means, sums)


def correct(
    divisor: torch.Tensor,
    misdivided: Misdivided,
    names: Sequence[str],
    dims: Sequence[int],
    batch: KeyedJaggedTensor,
) -> None:
    """Puts TorchRec's divisors right, in place.

    Args:
        divisor: divisors of a batch, [samples, columns of all embeddings].
        misdivided: embeddings to correct.
        names: names of the embeddings, in the order of the columns.
        dims: number of columns of each embedding.
        batch: ids of the batch, of one size for all keys.
    """
    sizes = bag_sizes(batch)
    for name, first, width in zip(names, accumulate(dims, initial=0), dims, strict=False):
        columns = divisor.narrow(1, first, width)
        if name in misdivided.means:
            columns.copy_((sizes[misdivided.means[name]] + _EPSILON).unsqueeze(1))
        elif name in misdivided.sums:
            columns.fill_(1).add_(_EPSILON)


def bag_sizes(batch: KeyedJaggedTensor) -> Mapping[str, torch.Tensor]:
    """Returns the number of ids of each bag, or the sum of their weights, by key."""
    sizes, weights = batch.lengths(), batch.weights_or_none()
    if weights is not None:
        sizes = torch.ops.fbgemm.segment_sum_csr(1, batch.offsets().int(), weights)
    return dict(zip(batch.keys(), sizes.view(-1, batch.stride()), strict=True))

"""Random models for the benchmarks of sharding, and the statistics of their ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

# Ids of a table are Zipf ranks, spread over the rows by a multiplication with a prime.
_PRIME = 2_147_483_647


@dataclass(frozen=True)
class TableSpec:
    """A table of a random model.

    Attributes:
        rows: number of rows.
        dim: number of columns.
        pooling: mean ids per sample.
        skew: Zipf exponent of its ids.
    """

    rows: int
    dim: int
    pooling: float
    skew: float

    def shares(self) -> NDArray[np.float64]:
        """Share of the ids of each row, the most frequent first, (rows)."""
        weights = np.arange(1, self.rows + 1, dtype=float) ** -self.skew
        return weights / weights.sum()


class ZipfReuse:
    """The statistics of a TableSpec's ids, as the planner asks for them.

    Args:
        spec: the table.
        samples: of a global batch, the only one that is planned for. The sum over all rows is made
            here, where sample batches would be counted: it is no part of planning.
    """

    def __init__(self, spec: TableSpec, samples: int) -> None:
        self.pooling_factor = spec.pooling
        self._samples = samples
        self._unique_rows = float(-np.expm1(-samples * spec.pooling * spec.shares()).sum())

    def unique_rows(self, samples: float) -> float:
        """Returns the expected number of distinct rows that the batch reads."""
        assert samples == self._samples
        return self._unique_rows


def random_specs(seed: int, tables: tuple[int, int], rows: tuple[float, float]) -> list[TableSpec]:
    """Returns a random model: log-uniform rows, log-normal pooling, as in dlrm_datasets."""
    random = np.random.default_rng(seed)
    return [
        TableSpec(
            rows=int(10 ** random.uniform(*np.log10(rows))),
            dim=int(random.choice([16, 32, 64, 128])),
            pooling=float(np.clip(np.exp(random.normal(1.2, 1.2)), 1, 60)),
            skew=float(random.uniform(0.2, 1.2)),
        )
        for _ in range(random.integers(*tables, endpoint=True))
    ]


def module_of(specs: Sequence[TableSpec]) -> EmbeddingBagCollection:
    """Returns the model's tables as an EmbeddingBagCollection, unsharded and without weights."""
    tables = [
        EmbeddingBagConfig(
            name=f"t{i}", embedding_dim=spec.dim, num_embeddings=spec.rows, feature_names=[f"f{i}"]
        )
        for i, spec in enumerate(specs)
    ]
    return EmbeddingBagCollection(device=torch.device("meta"), tables=tables)


def batch_of(specs: Sequence[TableSpec], samples: int, seed: int) -> KeyedJaggedTensor:
    """Returns a batch of ids that follow the specs."""
    random = np.random.default_rng(seed)
    lengths, values = [], []
    for spec in specs:
        each = random.poisson(spec.pooling, samples)
        ranks = np.searchsorted(np.cumsum(spec.shares()), random.random(each.sum()) * 0.999999)
        lengths.append(each)
        values.append(ranks.astype(np.int64) * _PRIME % spec.rows)
    return KeyedJaggedTensor(
        keys=[f"f{index}" for index in range(len(specs))],
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int32)),
    )

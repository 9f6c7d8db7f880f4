"""Batches whose size varies by key. They are padded to one size for the exchange, and restored
after.

A KeyedJaggedTensor may hold equal samples once per key. Then its inverse indices say for each
sample of the batch which row of a key it has.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

InverseIndices = tuple[list[str], torch.Tensor]


def varies(features: object) -> bool:
    """Returns whether `features` is a KeyedJaggedTensor with a batch size per key."""
    return isinstance(features, KeyedJaggedTensor) and features.variable_stride_per_key()


def padded(features: KeyedJaggedTensor, used: Iterable[str]) -> KeyedJaggedTensor:
    """Returns `features` with the largest batch size for all keys, by adding rows without ids.

    Args:
        features: features for which `varies` returns True.
        used: keys that need inverse indices.

    Raises:
        ValueError: the inverse indices, or the lengths, do not fit the batch sizes.
    """
    strides: list[int] = features.stride_per_key()
    lengths = features.lengths()
    if lengths.numel() != sum(strides):
        raise ValueError(
            f"input has {lengths.numel()} lengths, but its batch sizes per key are {strides}"
        )
    _check_inverse_indices(features, used)
    stride = max(strides, default=0)
    rectangle = lengths.new_zeros(len(strides), stride)
    for row, first, count in zip(rectangle, accumulate(strides, initial=0), strides, strict=False):
        row[:count] = lengths[first : first + count]
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=rectangle.view(-1),
        stride=stride,
    )


def with_batch_sizes_of(
    features: KeyedJaggedTensor, of_one_size: KeyedJaggedTensor
) -> KeyedJaggedTensor:
    """Returns `features` with the ids and weights of `of_one_size`. `of_one_size` was made from
    `features`, and may have been changed since."""
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=of_one_size.values(),
        weights=of_one_size.weights_or_none(),
        lengths=features.lengths().to(of_one_size.lengths().dtype),
        stride_per_key_per_rank=features.stride_per_key_per_rank(),
        inverse_indices=features.inverse_indices(),
    )


def with_all_samples(
    features: KeyedJaggedTensor,
    counts: Sequence[int],
    inverse: InverseIndices,
    used: Container[str],
) -> tuple[KeyedJaggedTensor, list[int]]:
    """Returns a batch with the ids of each sample under each key, and the number of ids of each.

    Args:
        features: features of one size for all keys, from `padded`.
        counts: number of ids of each key.
        inverse: row of each sample, [keys, samples], and the keys.
        used: keys that need ids, which were checked. Others get none.
    """
    names, indices = inverse
    keys, samples = features.keys(), indices.shape[1]
    lengths = features.lengths().view(len(keys), features.stride())
    all_lengths = lengths.new_zeros(len(keys), samples)
    places = [torch.empty(0, dtype=torch.int64)]
    first = 0
    for key, (name, of_rows, count) in enumerate(zip(keys, lengths, counts, strict=True)):
        if name in used:
            rows = indices[names.index(name)]
            all_lengths[key] = chosen = of_rows[rows]
            begins = first + (of_rows.cumsum(0) - of_rows)[rows]
            # Of each id its place in its row: its number among all less that of the row's first.
            row_begins = chosen.cumsum(0) - chosen
            places.append((begins - row_begins).repeat_interleave(chosen))
            places[-1] += torch.arange(len(places[-1]))
        first += count
    chosen_ids = torch.cat(places)
    weights = features.weights_or_none()
    whole = KeyedJaggedTensor(
        keys=keys,
        values=features.values()[chosen_ids],
        weights=None if weights is None else weights[chosen_ids],
        lengths=all_lengths.view(-1),
        stride=samples,
    )
    return whole, all_lengths.sum(1).tolist()


def _check_inverse_indices(features: KeyedJaggedTensor, used: Iterable[str]) -> None:
    inverse: InverseIndices | None = features.inverse_indices_or_none()
    if inverse is None:
        raise ValueError(
            "input has a batch size per key and no inverse_indices, which say the row of each "
            "sample: give them to the KeyedJaggedTensor"
        )
    names, indices = inverse
    rows = dict(zip(features.keys(), features.stride_per_key(), strict=True))
    for key in used:
        if key not in names:
            raise ValueError(f"inverse_indices are given for {names}, but not for key '{key}'")
        of_key = indices[names.index(key)]
        if of_key.numel() and not 0 <= int(of_key.min()) <= int(of_key.max()) < rows.get(key, 0):
            raise ValueError(
                f"inverse_indices of key '{key}' are from {int(of_key.min())} to "
                f"{int(of_key.max())}, but it has {rows.get(key, 0)} rows"
            )


def features_of_names(tables: Sequence[Any]) -> dict[str, str]:
    """Returns the feature of each embedding by its name. TorchRec names "feature@table" a feature
    that is looked up in several tables; other features' own names may look like that.

    Args:
        tables: EmbeddingConfig or EmbeddingBagConfig of each table.
    """
    names_by_table = get_embedding_names_by_table(list(tables))
    return {
        name: feature
        for table, names in zip(tables, names_by_table, strict=True)
        for name, feature in zip(names, table.feature_names, strict=True)
    }


def spread(output: Any, inverse: InverseIndices, features: Mapping[str, str]) -> KeyedTensor:
    """Returns a pooled output with one row for each sample, in place of the rows of each key.

    Args:
        output: KeyedTensor, [rows, columns of all keys].
        inverse: inverse indices by name, [keys, samples].
        features: feature of each key of the output.
    """
    names, indices = inverse
    columns = output.values().split(output.length_per_key(), dim=1)
    rows = [indices[names.index(features[name])] for name in output.keys()]  # noqa: SIM118
    values = torch.cat([c.index_select(0, r) for c, r in zip(columns, rows, strict=True)], dim=1)
    return KeyedTensor(output.keys(), output.length_per_key(), values)

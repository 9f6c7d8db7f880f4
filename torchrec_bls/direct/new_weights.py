"""Shards of new weights, cut from a table's entry in a state dict."""

from collections.abc import Mapping
from typing import Any

import torch

from torchrec_bls.direct.layout import Shard, TableLayout


def cut(
    name: str, value: Any, layout: TableLayout, shard: Shard, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the rows and columns of `shard`, contiguous, in host memory.

    Args:
        name: name of the entry, for messages.
        value: whole table, [rows, columns], or a ShardedTensor that has the shard here.
        layout: layout of the table.
        shard: shard to return.
        dtype: dtype of the table.

    Raises:
        ValueError: `value` is something else, or has another shape or dtype.
    """
    if hasattr(value, "local_shards"):
        _check(name, tuple(value.size()), (layout.rows, layout.columns))
        found = _local_shard(name, value, shard)
    elif isinstance(value, torch.Tensor):
        check_is_dense(name, value)  # a sparse one can't be sliced
        _check(name, tuple(value.shape), (layout.rows, layout.columns))
        rows = slice(shard.first_row, shard.first_row + shard.rows)
        columns = slice(shard.first_column, shard.first_column + shard.columns)
        found = value[rows, columns]
    else:
        raise ValueError(
            f"'{name}' is a {type(value).__name__}: give the whole table as a tensor, or a "
            "ShardedTensor of the plan of this model"
        )
    check_is_dense(name, found)
    if found.dtype != dtype:
        raise ValueError(f"'{name}' is of {found.dtype}, but the table has {dtype}")
    return found.detach().cpu().contiguous()


def _local_shard(name: str, value: Any, shard: Shard) -> torch.Tensor:
    place = [shard.first_row, shard.first_column], [shard.rows, shard.columns]
    for local in value.local_shards():
        if (list(local.metadata.shard_offsets), list(local.metadata.shard_sizes)) == place:
            tensor: torch.Tensor = local.tensor
            _check(name, tuple(tensor.shape), (shard.rows, shard.columns))
            return tensor
    raise ValueError(
        f"'{name}' has no local shard of rows {shard.first_row} to "
        f"{shard.first_row + shard.rows} and columns {shard.first_column} to "
        f"{shard.first_column + shard.columns}: give a ShardedTensor of the plan of this model, or "
        "the whole table as a tensor"
    )


def _check(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ValueError(f"'{name}' has shape {list(shape)}, but the model's has {list(expected)}")


def check_is_dense(name: str, value: Any) -> None:
    """Raises ValueError for anything but a tensor with all its values in memory."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"'{name}' is a {type(value).__name__}, but must be a tensor")
    if value.is_meta or value.layout is not torch.strided:
        kind = "on the device 'meta'" if value.is_meta else f"of the layout {value.layout}"
        raise ValueError(f"'{name}' is {kind}, but must have all its values in memory")


def entry_of(state_dict: Mapping[str, Any], key: str) -> Any:
    """Returns an entry. Raises ValueError if there is none."""
    if key not in state_dict:
        raise ValueError(f"the state_dict has no '{key}', which the model has")
    return state_dict[key]


def prefix_of(module: str, pooled: bool) -> str:
    """Returns the prefix of a module's tables in TorchRec's state dicts.

    Args:
        module: name of the module in the model.
        pooled: whether it is an EmbeddingBagCollection, not an EmbeddingCollection.
    """
    collection = "embedding_bags." if pooled else "embeddings."
    return f"{module}.{collection}" if module else collection

"""Rows of new weights, from a table's entry in a state dict."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from torchrec_bls.checkpoints import Checkpoint, Rows
from torchrec_bls.direct.layout import Shard, TableLayout


def rows_read(name: str, value: torch.Tensor | Rows, first: int, end: int) -> torch.Tensor:
    """Returns rows, contiguous, in host memory that nobody else writes to.

    Raises:
        ValueError: they can't be read.
    """
    if isinstance(value, torch.Tensor):
        return value[first:end].detach().to("cpu", copy=True).contiguous()
    rows = value.read(first, end)
    expected = (end - first, *value.shape[1:])
    if tuple(rows.shape) != expected or rows.dtype != value.dtype:
        raise ValueError(
            f"rows {first} to {end} of '{name}' came as {list(rows.shape)} of {rows.dtype}, not as "
            f"{list(expected)} of {value.dtype}"
        )
    return rows.contiguous()


def rows_of_shard(
    name: str, value: Any, layout: TableLayout, shard: Shard, dtype: torch.dtype
) -> Callable[[int, int], torch.Tensor]:
    """Returns a function that reads rows of a shard, [rows, columns], see `rows_read`. They are
    counted from the shard's first one.

    Args:
        name: name of the entry, for messages.
        value: whole table, [rows, columns], or a ShardedTensor that has the shard here.
        layout: layout of the table.
        shard: the shard.
        dtype: dtype of the table.

    Raises:
        ValueError: `value` is something else, or has another shape or dtype.
    """
    whole = (layout.rows, layout.columns)
    columns = slice(shard.first_column, shard.first_column + shard.columns)
    if hasattr(value, "local_shards"):
        _check(name, tuple(value.size()), whole)
        found = _local_shard(name, value, shard)
    elif isinstance(value, torch.Tensor):
        check_is_dense(name, value)  # a sparse one can't be sliced
        _check(name, tuple(value.shape), whole)
        found = value[shard.first_row : shard.first_row + shard.rows, columns]
    elif isinstance(value, Rows):
        _check(name, tuple(value.shape), whole)
        _check_dtype(name, value.dtype, dtype)

        def read(first: int, end: int) -> torch.Tensor:
            rows = rows_read(name, value, shard.first_row + first, shard.first_row + end)
            return rows[:, columns].contiguous()

        return read
    else:
        raise ValueError(
            f"'{name}' is a {type(value).__name__}: give the whole table as a tensor, or a "
            "ShardedTensor of the plan of this model"
        )
    check_is_dense(name, found)
    _check_dtype(name, found.dtype, dtype)
    return partial(rows_read, name, found)


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


def _check_dtype(name: str, dtype: torch.dtype, expected: torch.dtype) -> None:
    if dtype != expected:
        raise ValueError(f"'{name}' is of {dtype}, but the table has {expected}")


def check_is_dense(name: str, value: Any) -> None:
    """Raises ValueError for anything but a tensor with all its values in memory."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"'{name}' is a {type(value).__name__}, but must be a tensor")
    if value.is_meta or value.layout is not torch.strided:
        kind = "on the device 'meta'" if value.is_meta else f"of the layout {value.layout}"
        raise ValueError(f"'{name}' is {kind}, but must have all its values in memory")


@contextmanager
def named_source(state_dict: Mapping[str, Any] | None) -> Iterator[None]:
    """Has each ValueError say which checkpoint was read, if one was."""
    try:
        yield
    except ValueError as error:
        path = str(state_dict.path) if isinstance(state_dict, CheckpointWeights) else ""
        if path in str(error):
            raise
        raise ValueError(f"checkpoint {path}: {error}") from error


def trained_at(state_dict: Mapping[str, Any] | None) -> float | None:
    """Returns when a training had new weights, in seconds since 1970; None if that is unknown.

    A checkpoint does not say it. The last of its files was written later."""
    return state_dict.written if isinstance(state_dict, CheckpointWeights) else None


class CheckpointWeights(Mapping[str, Any]):
    """The entries of a checkpoint by their names in the state dict of a model.

    Args:
        checkpoint: checkpoint of the model, or of a part of it.

    Attributes:
        path: path of the checkpoint.
        written: see Checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = checkpoint.path
        self.written = checkpoint.written
        self._checkpoint = checkpoint
        self._prefix = ""
        self._outside: Mapping[str, Any] = {}

    def of_part(self, prefix: str, outside: Mapping[str, Any]) -> "CheckpointWeights":
        """Returns the entries of a whole model.

        Args:
            prefix: prefix of the names in it of the part that the checkpoint is of.
            outside: entries outside of the part.
        """
        weights = CheckpointWeights(self._checkpoint)
        weights._prefix, weights._outside = prefix, outside
        return weights

    def __getitem__(self, name: str) -> Any:
        if name in self._outside:
            return self._outside[name]
        if not name.startswith(self._prefix):
            raise KeyError(name)
        return self._checkpoint[name.removeprefix(self._prefix)]

    def __contains__(self, name: object) -> bool:
        # Entries of other kinds are there, and can't be read.
        return name in self._outside or (
            isinstance(name, str)
            and name.startswith(self._prefix)
            and name.removeprefix(self._prefix) in self._checkpoint
        )

    def __iter__(self) -> Iterator[str]:
        yield from self._outside
        for name in self._checkpoint:
            yield f"{self._prefix}{name}"

    def __len__(self) -> int:
        return len(self._outside) + len(self._checkpoint)

    def check_has_no_more(self, prefix: str, tables: Collection[str]) -> None:
        """Raises ValueError if the checkpoint has other tables as well.

        Args:
            prefix: prefix of the tables' names.
            tables: names of the tables.
        """
        given = {name[len(prefix) :].partition(".")[0] for name in self if name.startswith(prefix)}
        if more := sorted(given - set(tables)):
            raise ValueError(
                f"it has tables {more} in '{prefix[:-1]}', which the model lacks: publish a "
                "checkpoint of the same model"
            )


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

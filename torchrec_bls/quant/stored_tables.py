"""Quantized tables as FBGEMM stores them: the place of each, and the source of its bytes.

A row of INT8, INT4 or INT2 is scale and shift, two fp16 numbers in front, and the packed weights. A
row of FP16 or FP32 is its weights. FBGEMM pads rows to the module's alignment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS, DataType

_WITH_SCALE = (DataType.INT8, DataType.INT4, DataType.INT2)
_FLOATS = {DataType.FP16: torch.float16, DataType.FP32: torch.float32}
# Bytes of a checkpoint that are quantized at once, and so are in memory twice.
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class StoredTable:
    """A table in the memory of all tables of a module.

    Attributes:
        name: name of the table.
        rows: number of rows.
        columns: number of columns.
        data_type: type of the weights.
        row_bytes: bytes of a row, padding included.
        used_bytes: bytes of a row, without padding.
        begin: first byte in the memory of all tables.
    """

    name: str
    rows: int
    columns: int
    data_type: DataType
    row_bytes: int
    used_bytes: int
    begin: int

    @property
    def end(self) -> int:
        """Returns the place after the last byte."""
        return self.begin + self.rows * self.row_bytes


class RowSource(Protocol):
    """The source of a module's stored rows."""

    def rows(self, table: StoredTable, first: int, end: int) -> torch.Tensor:
        """Returns rows as they are stored, uint8 [end - first, row_bytes].

        Raises:
            ValueError: the rows are missing, or do not fit the table.
        """


class ModuleRows:
    """Rows of a quantized module that has its weights.

    Args:
        lookups: FBGEMM's modules.
        begins: first byte of each module's weights in the memory of all tables.
    """

    def __init__(self, lookups: Sequence[Any], begins: Sequence[int]) -> None:
        self._weights = [
            (begin, begin + lookup.weights_host.numel(), lookup.weights_host)
            for lookup, begin in zip(lookups, begins, strict=True)
        ]

    def rows(self, table: StoredTable, first: int, end: int) -> torch.Tensor:
        """See RowSource; a view of the module's weights."""
        begin, weights = next(
            (begin, weights)
            for begin, weights_end, weights in self._weights
            if begin <= table.begin < weights_end
        )
        at = table.begin - begin
        stored: torch.Tensor = weights[at + first * table.row_bytes : at + end * table.row_bytes]
        return stored.view(end - first, table.row_bytes)


class CheckpointRows:
    """Rows of a float checkpoint, quantized as TorchRec quantizes a module.

    Args:
        checkpoint: float32 or float16 weights, [rows, columns], by name in the state dict.
        prefix: prefix of the tables' names in the checkpoint.
    """

    def __init__(self, checkpoint: Mapping[str, torch.Tensor], prefix: str) -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix

    def rows(self, table: StoredTable, first: int, end: int) -> torch.Tensor:
        """See RowSource; only these rows are read and quantized."""
        weights = self._weights(table)
        stored = torch.zeros(end - first, table.row_bytes, dtype=torch.uint8)
        step = max(1, _CHUNK_BYTES // (4 * table.columns))
        for begin in range(first, end, step):
            part = slice(begin, min(begin + step, end))
            rows = _stored(weights[part].contiguous(), table.data_type)
            stored[begin - first : part.stop - first, : rows.shape[1]] = rows
        return stored

    def _weights(self, table: StoredTable) -> torch.Tensor:
        name = f"{self._prefix}.{table.name}.weight"
        if name not in self._checkpoint:
            raise ValueError(
                f"the checkpoint has no '{name}', the weights of table '{table.name}': give the "
                "state dict of the float model, with its names"
            )
        weights = self._checkpoint[name]
        if tuple(weights.shape) != (table.rows, table.columns):
            raise ValueError(
                f"'{name}' has the shape {tuple(weights.shape)} in the checkpoint, but its table "
                f"is {(table.rows, table.columns)}"
            )
        if weights.dtype not in (torch.float32, torch.float16) or weights.device.type != "cpu":
            raise ValueError(
                f"'{name}' is {weights.dtype} on {weights.device} in the checkpoint, but must be "
                "float32 or float16 on the CPU to be quantized"
            )
        return weights.detach()


def row_source(
    lookups: Sequence[Any],
    begins: Sequence[int],
    checkpoint: Mapping[str, torch.Tensor] | None,
    prefix: str,
) -> RowSource:
    """Returns the source of a module's rows.

    Args:
        lookups: FBGEMM's modules.
        begins: first byte of each module's weights in the memory of all tables.
        checkpoint: float weights, by name in the state dict; None: the lookups have the weights.
        prefix: prefix of the tables' names in the checkpoint.
    """
    if checkpoint is None:
        return ModuleRows(lookups, begins)
    return CheckpointRows(checkpoint, prefix)


def is_supported(data_type: DataType) -> bool:
    """Returns whether tables of a type can be shared."""
    return data_type in _WITH_SCALE or data_type in _FLOATS


def stored_bytes(source: RowSource, table: StoredTable, begin: int, end: int) -> torch.Tensor:
    """Returns the bytes [begin, end) of the memory of all tables, which are in `table`, uint8."""
    first = (begin - table.begin) // table.row_bytes
    last = -(-(end - table.begin) // table.row_bytes)
    rows = source.rows(table, first, last).view(-1)
    skipped = begin - table.begin - first * table.row_bytes
    return rows[skipped : skipped + end - begin]


def _stored(weights: torch.Tensor, data_type: DataType) -> torch.Tensor:
    """Returns rows without padding. FBGEMM's quantization puts scale and shift last; here they come
    first."""
    if data_type in _FLOATS:
        return weights.to(_FLOATS[data_type]).view(torch.uint8)
    rows = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(
        weights, DATA_TYPE_NUM_BITS[data_type]
    )
    return torch.cat([rows[:, -4:], rows[:, :-4]], dim=1)

"""Quantized tables as FBGEMM stores them: the place of each, and the source of its bytes.

A row of INT8, INT4 or INT2 is scale and shift, two fp16 numbers in front, and the packed weights. A
row of FP16 or FP32 is its weights. FBGEMM pads rows to the module's alignment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS, DataType
from torchrec.tensor_types import UInt2Tensor, UInt4Tensor

from torchrec_bls import _native
from torchrec_bls.checkpoints import Rows
from torchrec_bls.direct.new_weights import check_is_dense, rows_read
from torchrec_bls.direct.steps import RowsRead

#: TorchRec's tensors of packed numbers, by the type of a table.
PACKED = {DataType.INT4: UInt4Tensor, DataType.INT2: UInt2Tensor}
_WITH_SCALE = (DataType.INT8, DataType.INT4, DataType.INT2)
_FLOATS = {DataType.FP16: torch.float16, DataType.FP32: torch.float32}
# Bytes of scale and shift.
_SCALE_BYTES = 4
# Dtypes of weights in a state dict.
_GIVEN = (torch.float32, torch.float16, torch.uint8)
# Bytes of float32 rows that are quantized at once, and so are in memory twice.
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

    def check(self, table: StoredTable) -> None:
        """Raises ValueError if the rows of a table are missing, or do not fit it."""

    def read(self, table: StoredTable, first: int, end: int) -> RowsRead:
        """Reads rows; they are stored as uint8 [end - first, row_bytes].

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

    def check(self, table: StoredTable) -> None:
        """See RowSource."""

    def read(self, table: StoredTable, first: int, end: int) -> RowsRead:
        """See RowSource; a view of the module's weights, which others may write to."""
        begin, weights = next(
            (begin, weights)
            for begin, weights_end, weights in self._weights
            if begin <= table.begin < weights_end
        )
        at = table.begin - begin
        stored: torch.Tensor = weights[at + first * table.row_bytes : at + end * table.row_bytes]
        return RowsRead((), lambda: stored.view(end - first, table.row_bytes))


class StateDictRows:
    """Rows of a state dict of the float model, quantized as TorchRec quantizes a module; or of one
    of the quantized model, which has rows as they are stored.

    Args:
        state_dict: for each table by its name float32 or float16 weights, [rows, columns]; or
            stored rows, uint8 [rows, bytes], with scale and shift in them, or beside them as
            `weight_qscale` and `weight_qbias`.
        prefix: prefix of the tables' names in the state dict.
        what: what the state dict is, for messages.
    """

    def __init__(self, state_dict: Mapping[str, Any], prefix: str, what: str) -> None:
        self._state_dict = state_dict
        self._prefix = prefix
        self._what = what
        # Weights of each table, once they are checked: steps of rows ask for them.
        self._checked: dict[StoredTable, list[torch.Tensor | Rows]] = {}

    def check(self, table: StoredTable) -> None:
        """See RowSource."""
        for weights in self._found(table):
            if not isinstance(weights, Rows):
                check_is_dense(f"{self._prefix}{table.name}.weight", weights)

    def read(self, table: StoredTable, first: int, end: int) -> RowsRead:
        """See RowSource; only these rows are read and quantized."""
        name = f"{self._prefix}{table.name}.weight"
        source = tuple(rows_read(name, each, first, end) for each in self._found(table))
        return RowsRead(source, partial(_stored, table, *source))

    def _found(self, table: StoredTable) -> list[torch.Tensor | Rows]:
        if table not in self._checked:
            self._checked[table] = self._weights(table)
        return self._checked[table]

    def _weights(self, table: StoredTable) -> list[torch.Tensor | Rows]:
        """Returns the weights, and scale and shift if these are beside them."""
        name = f"{self._prefix}{table.name}.weight"
        value = self._entry(name, table)
        weights = _plain(value)
        device = weights.device if isinstance(weights, torch.Tensor) else "cpu"
        if str(device) != "cpu" or weights.dtype not in _GIVEN:
            raise ValueError(
                f"'{name}' is {weights.dtype} on {device} in {self._what}, but must be "
                "on the CPU: float32 or float16 to be quantized, or uint8, the stored rows of a "
                "quantized model"
            )
        if weights.dtype != torch.uint8:
            self._check_shape(name, weights, (table.rows, table.columns), "its table is")
            return [weights]
        expected = PACKED.get(table.data_type, torch.Tensor).__name__
        if _kind_of(value) != expected:
            # Rows of few columns have as many bytes in several types.
            raise ValueError(
                f"'{name}' has stored rows in a {_kind_of(value)} in {self._what}, but table "
                f"'{table.name}' has {table.data_type.name} rows, which come in a {expected}"
            )
        is_split = f"{name}_qscale" in self._state_dict
        is_stored = tuple(weights.shape) == (table.rows, table.used_bytes)
        width = table.used_bytes - _SCALE_BYTES if is_split else table.row_bytes
        if is_split or not is_stored:
            rows = f"table '{table.name}' has {table.data_type.name} rows of"
            self._check_shape(name, weights, (table.rows, width), rows)
        beside = [
            _plain(self._entry(f"{name}_{each}", table))
            for each in (("qscale", "qbias") if is_split else ())
        ]
        for each in beside:
            self._check_shape(f"{name}_qscale or _qbias", each, (table.rows, 1), "it must be")
            if each.dtype != torch.float16:
                raise ValueError(f"'{name}_qscale' or '_qbias' is {each.dtype}, not torch.float16")
        return [weights, *beside]

    def _entry(self, name: str, table: StoredTable) -> torch.Tensor | Rows:
        if name not in self._state_dict:
            raise ValueError(
                f"{self._what} has no '{name}', the weights of table '{table.name}': give the "
                "state dict of the float model, or of the quantized one, with its names"
            )
        value = self._state_dict[name]
        if not isinstance(value, (torch.Tensor, Rows)):
            raise ValueError(
                f"'{name}' is a {type(value).__name__} in {self._what}: give the whole table as a "
                "tensor, since a page may have rows of two ranks"
            )
        return value

    def _check_shape(
        self, name: str, given: torch.Tensor | Rows, expected: tuple[int, int], says: str
    ) -> None:
        if tuple(given.shape) != expected:
            raise ValueError(
                f"'{name}' has the shape {tuple(given.shape)} in {self._what}, but {says} "
                f"{expected}"
            )


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
        checkpoint: see StateDictRows; None: the lookups have the weights.
        prefix: prefix of the tables' names in the checkpoint.
    """
    if checkpoint is None:
        return ModuleRows(lookups, begins)
    return StateDictRows(checkpoint, prefix, "the checkpoint")


def is_supported(data_type: DataType) -> bool:
    """Returns whether tables of a type can be shared."""
    return data_type in _WITH_SCALE or data_type in _FLOATS


def stored_rows(source: RowSource, table: StoredTable, first: int, end: int) -> torch.Tensor:
    """Returns rows of a table as they are stored, uint8 [end - first, row_bytes]."""
    stored = torch.empty(end - first, table.row_bytes, dtype=torch.uint8)
    step = max(1, _CHUNK_BYTES // (4 * table.columns))
    for begin in range(first, end, step):
        stop = min(begin + step, end)
        stored[begin - first : stop - first] = source.read(table, begin, stop).stored()
    return stored


def _plain(weights: torch.Tensor | Rows) -> torch.Tensor | Rows:
    """Returns the bytes of TorchRec's tensors of packed numbers, and other entries as they are."""
    packed: torch.Tensor | Rows = getattr(weights, "elem", weights)
    return packed


def _kind_of(value: torch.Tensor | Rows) -> str:
    """Returns the name of the class of TorchRec's tensors of packed numbers, or "Tensor"."""
    if isinstance(value, Rows):
        return value.tensor_type.rpartition(".")[2]
    return type(value).__name__ if isinstance(value, tuple(PACKED.values())) else "Tensor"


def _stored(table: StoredTable, rows: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
    """Returns rows as they are stored.

    Args:
        table: their table.
        rows: float weights; or stored rows, uint8.
        beside: scale and shift of stored rows that have none.
    """
    stored = torch.empty(len(rows), table.row_bytes, dtype=torch.uint8)
    is_new = rows.dtype == torch.float32 and table.data_type is DataType.INT8
    # FBGEMM works value by value at 8 bits, six times as long. It has the rest of such rows.
    if is_new and _native.store_int8_rows(rows, stored) == len(rows):
        return stored
    columns = [*(each.view(torch.uint8) for each in beside), rows]
    if rows.dtype != torch.uint8:
        columns = _quantized(rows, table.data_type)
    at = 0
    for each in columns:
        stored[:, at : at + each.shape[1]] = each
        at += each.shape[1]
    stored[:, at:] = 0  # padding
    return stored


def _quantized(weights: torch.Tensor, data_type: DataType) -> list[torch.Tensor]:
    """Returns the columns of stored rows. FBGEMM's quantization puts scale and shift last; in a
    table they come first."""
    if data_type in _FLOATS:
        return [weights.to(_FLOATS[data_type]).view(torch.uint8)]
    rows = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(
        weights, DATA_TYPE_NUM_BITS[data_type]
    )
    return [rows[:, -_SCALE_BYTES:], rows[:, :-_SCALE_BYTES]]

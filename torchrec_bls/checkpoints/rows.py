"""Tensors of a checkpoint whose rows are read from files when they are asked for."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from torchrec_bls.checkpoints.files import Files

_Sizes = tuple[int, ...]
# Values of whole bytes: not quantized, nor of few bits.
_OF_BYTES = re.compile(r"bool|u?int(8|16|32|64)|b?float(8_\w+|16|32|64)|complex(64|128)")
#: Dtypes by the names that torch gives them.
DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and _OF_BYTES.fullmatch(name)
}
_MOST_BYTES = 2**63 - 1
# Of a tensor's rows and columns between the borders of its blocks, which are compared one by one.
_MOST_CELLS = 10_000_000


@runtime_checkable
class Rows(Protocol):
    """An entry of a checkpoint: a tensor whose rows can be read.

    Attributes:
        shape: sizes of the tensor.
        dtype: dtype of its values.
        tensor_type: class of the tensor that was saved. "torch.Tensor", but for TorchRec's tensors
            of packed numbers, such as "torchrec.tensor_types.UInt4Tensor": of these the rows are
            the packed bytes, torch.uint8.
        where: name of the entry and path of the checkpoint, for errors.
    """

    shape: _Sizes
    dtype: torch.dtype
    tensor_type: str
    where: str

    def read(self, first: int, end: int) -> torch.Tensor:
        """Returns the rows [first, end), contiguous, in memory of their own.

        Raises:
            ValueError: there are no such rows, or the files lack them, have changed since the
                checkpoint was opened, or can't be read; or the checkpoint is closed.
        """

    def whole(self) -> torch.Tensor:
        """Returns the whole tensor, also one that has no rows. Raises as `read` does."""


@dataclass(frozen=True)
class Strided:
    """Values in a file.

    Attributes:
        path: file that has them.
        begin: byte of the first value.
        dtype: dtype of the values.
        shape: sizes.
        strides: distances of neighbours in each dimension, in values.
    """

    path: Path
    begin: int
    dtype: torch.dtype
    shape: _Sizes
    strides: _Sizes

    @classmethod
    def by_rows(cls, path: Path, begin: int, dtype: torch.dtype, shape: _Sizes) -> "Strided":
        """Returns values that lie one row after the other."""
        return cls(path, begin, dtype, shape, row_strides(shape))

    def read_into(self, out: torch.Tensor, first: int, files: Files, what: str) -> None:
        """Fills `out` with rows from `first` on.

        Args:
            out: [rows, ...], strided as it may be.
            first: first row.
            files: files of the checkpoint.
            what: what is read, for errors.
        """
        size = self.dtype.itemsize
        begin = self.begin + first * self.strides[0] * size
        if self.strides == row_strides(self.shape) and out.is_contiguous():
            files.read_into(self.path, begin, _bytes_of(out), what)
            return
        span = 1 + sum(
            (length - 1) * stride for length, stride in zip(out.shape, self.strides, strict=True)
        )
        values = torch.empty(span, dtype=self.dtype)
        files.read_into(self.path, begin, _bytes_of(values), what)
        out.copy_(values.as_strided(out.shape, self.strides))


@dataclass(frozen=True)
class Block:
    """A block of a tensor.

    Attributes:
        offsets: its first row, column, ...
        shape: its sizes.
        find: finds its values; cheap if called again.
    """

    offsets: _Sizes
    shape: _Sizes
    find: Callable[[], Strided]


class StoredRows:
    """Rows that lie in blocks of values; see Rows.

    Args:
        where: see Rows.
        shape: see Rows.
        dtype: see Rows.
        blocks: blocks of the tensor. Those of a tensor without dimensions have none either.
        files: files of the checkpoint.
        tensor_type: see Rows.

    Raises:
        ValueError: the blocks are not the whole tensor, each value once.
    """

    def __init__(
        self,
        where: str,
        shape: _Sizes,
        dtype: torch.dtype,
        blocks: Sequence[Block],
        files: Files,
        tensor_type: str = "torch.Tensor",
    ) -> None:
        self.where = where
        self.shape = shape
        self.dtype = dtype
        self.tensor_type = tensor_type
        self._files = files
        self._blocks = sorted(
            (block for block in blocks if math.prod(block.shape)), key=lambda block: block.offsets
        )
        if bytes_of(tuple(max(1, size) for size in shape), dtype) > _MOST_BYTES:
            raise ValueError(f"{where} has the shape {list(shape)}, more than a file can have")
        _check_cover(where, shape, self._blocks)

    def read(self, first: int, end: int) -> torch.Tensor:
        """See Rows."""
        if not self.shape or not 0 <= first <= end <= self.shape[0]:
            raise ValueError(
                f"{self.where} has the shape {list(self.shape)}, and so no rows {first} to {end}"
            )
        asked = [
            (block, self._found(block))
            for block in self._blocks
            if max(first, block.offsets[0]) < min(end, block.offsets[0] + block.shape[0])
        ]
        # Only now, since what is found bounds it.
        out = self._files.memory.rows((end - first, *self.shape[1:]), self.dtype)
        for block, values in asked:
            begin = max(first, block.offsets[0])
            stop = min(end, block.offsets[0] + block.shape[0])
            inner = zip(block.offsets[1:], block.shape[1:], strict=True)
            place = slice(begin - first, stop - first), *(slice(o, o + n) for o, n in inner)
            what = f"rows {begin} to {stop} of {self.where}"
            values.read_into(out[place], begin - block.offsets[0], self._files, what)
        return out

    def whole(self) -> torch.Tensor:
        """See Rows."""
        if self.shape:
            return self.read(0, self.shape[0])
        out = torch.empty(1, dtype=self.dtype)
        found = self._found(self._blocks[0])
        Strided.by_rows(found.path, found.begin, found.dtype, (1,)).read_into(
            out, 0, self._files, self.where
        )
        return out.reshape(())

    def _found(self, block: Block) -> Strided:
        found = block.find()
        if (found.shape, found.dtype) != (block.shape, self.dtype):
            raise ValueError(
                f"{found.path} has {list(found.shape)} values of {found.dtype} for {self.where}, "
                f"but {list(block.shape)} of {self.dtype} belong there: write the checkpoint again"
            )
        return found


def bytes_of(shape: _Sizes, dtype: torch.dtype) -> int:
    """Returns the bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


def row_strides(shape: _Sizes) -> _Sizes:
    """Returns the strides of a contiguous tensor, in values."""
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    numbers: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


def _check_cover(where: str, shape: _Sizes, blocks: Sequence[Block]) -> None:
    """Raises ValueError unless each value is in exactly one block."""
    cuts: list[dict[int, int]] = []
    for axis, size in enumerate(shape):
        borders = {0, size}
        for block in blocks:
            begin, end = block.offsets[axis], block.offsets[axis] + block.shape[axis]
            if not 0 <= begin < end <= size:
                raise ValueError(
                    f"{where} has the shape {list(shape)}, but a block at {list(block.offsets)} of "
                    f"{list(block.shape)}: write the checkpoint again"
                )
            borders |= {begin, end}
        cuts.append({border: at for at, border in enumerate(sorted(borders))})
    cells = tuple(len(borders) - 1 for borders in cuts)
    if math.prod(cells) > _MOST_CELLS:
        raise ValueError(f"{where} is in too many blocks ({len(blocks)}): save larger ones")
    is_filled = np.zeros(cells, bool)
    for block in blocks:
        place = tuple(
            slice(borders[begin], borders[begin + length])
            for borders, begin, length in zip(cuts, block.offsets, block.shape, strict=True)
        )
        if is_filled[place].any():
            raise ValueError(
                f"{where} has two blocks at {list(block.offsets)}: write the checkpoint again"
            )
        is_filled[place] = True
    if not is_filled.all():
        raise ValueError(f"{where} is not whole: some values are in no block: write it again")

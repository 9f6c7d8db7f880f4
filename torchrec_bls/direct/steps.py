"""The content of an owner's bytes, read in steps: each source row once."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchrec_bls.direct.beside_lookups import one_torch_thread

# Bytes of source rows, or of stored ones where these are longer, that are in memory at once. They
# stay in a processor's cache from the read to the last use. Of steps of 16 MiB the allocator kept
# 300 MiB that were free.
_STEP = 4 << 20


@dataclass(frozen=True)
class RowsRead:
    """Rows as they were read.

    Attributes:
        source: contiguous tensors, [rows, ...], in memory that nobody else writes to: all that
            the stored bytes depend on. Empty: nobody may take the stored bytes for those of
            another version.
        stored: function that returns the rows as they are stored, contiguous, [rows, row bytes].
    """

    source: tuple[torch.Tensor, ...]
    stored: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Run:
    """Consecutive bytes of an owner that are of one table.

    Attributes:
        name: name of the table's weights, for messages.
        origin: place of its row 0 among the owner's bytes, as if the owner had all rows before
            these; it may be negative.
        begin: place of the first byte.
        end: place after the last byte.
        row_bytes: bytes of a stored row.
        source_row_bytes: bytes of a source row, at most.
        read: function that returns rows, from the first one to the one before the second.
    """

    name: str
    origin: int
    begin: int
    end: int
    row_bytes: int
    source_row_bytes: int
    read: Callable[[int, int], RowsRead]

    def steps(self, begin: int, end: int) -> Iterator["Step"]:
        """Yields the bytes of the run that are in a range, in steps of whole rows."""
        at, end = max(begin, self.begin), min(end, self.end)
        rows = max(1, _STEP // max(self.row_bytes, self.source_row_bytes))
        while at < end:
            first = (at - self.origin) // self.row_bytes
            step_end = min(end, self.origin + (first + rows) * self.row_bytes)
            yield self._step(at, step_end, first)
            at = step_end

    @one_torch_thread()
    def _step(self, begin: int, end: int, first: int) -> "Step":
        read = self.read(first, -(-(end - self.origin) // self.row_bytes))
        skipped = begin - self.origin - first * self.row_bytes

        @one_torch_thread()
        def check() -> None:
            for tensor in read.source:
                _refuse_not_finite(self.name, tensor, first)

        @one_torch_thread()
        def stored() -> torch.Tensor:
            check()
            return read.stored().view(-1).view(torch.uint8)[skipped : skipped + end - begin]

        return Step(begin, end - begin, _digest(read.source), check, stored)


class Step(NamedTuple):
    """Some of an owner's bytes.

    Attributes:
        place: place of the first byte among the owner's.
        size: number of the bytes.
        digest: digest of all that they depend on beside the layout; empty if it is not known.
        check: function that raises ValueError if no version may have the bytes. A version that has
            the same digest was checked when its bytes were stored.
        stored: function that checks the bytes and returns them, uint8.
    """

    place: int
    size: int
    digest: bytes
    check: Callable[[], None]
    stored: Callable[[], torch.Tensor]


# Yields the steps of a range of an owner's bytes, the same ones for each version of a layout. What
# is in none of them is zero.
Content = Callable[[int, int], Iterator[Step]]


def content_of(runs: Sequence[Run]) -> Content:
    """Returns the content of an owner's bytes.

    Its steps refuse weights that are NaN or infinite, with table and row.

    Args:
        runs: the owner's runs, which do not overlap.
    """

    def steps(begin: int, end: int) -> Iterator[Step]:
        for run in runs:
            yield from run.steps(begin, end)

    return steps


def content_in_memory(tensors: Sequence[tuple[torch.Tensor, int]]) -> Content:
    """Returns the content of an owner's bytes that others may write to later, so that no version
    takes it for its own.

    Args:
        tensors: contiguous tensors, and their places among the owner's bytes.
    """

    def steps(begin: int, end: int) -> Iterator[Step]:
        for tensor, place in tensors:
            first, last = max(begin, place), min(end, place + tensor.nbytes)
            if first < last:
                stored = tensor.detach().view(-1).view(torch.uint8)[first - place : last - place]
                yield Step(first, last - first, b"", _any_bytes, stored.clone)

    return steps


def _any_bytes() -> None:
    """Refuses no bytes: they serve already."""


def _digest(source: Sequence[torch.Tensor]) -> bytes:
    if not source:
        return b""
    digest = hashlib.sha256()
    for tensor in source:
        digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _refuse_not_finite(name: str, rows: torch.Tensor, first: int) -> None:
    """Raises ValueError if a weight is NaN or infinite. The sum of all is if one is."""
    if not rows.is_floating_point() or math.isfinite(rows.sum(dtype=torch.float32).item()):
        return
    finite = rows.isfinite().view(len(rows), -1).all(dim=1)
    if not bool(finite.all()):
        row = first + int(finite.logical_not().nonzero()[0])
        raise ValueError(
            f"'{name}' has NaN or infinite weights, in row {row} for example: publish a checkpoint "
            "of sound weights"
        )

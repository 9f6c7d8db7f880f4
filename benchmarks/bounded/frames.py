"""Frames of error-bounded tables, as a rank sends them to another one."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from torchrec_bls import _native

#: Of a frame, beside its tables.
HEAD_BYTES = 28
Groups = npt.NDArray[np.uint32]  # [tables, rows]


def groups_of(ids: npt.NDArray[np.int64]) -> Groups:
    """Which rows of each table have equal ids, for ids [rows, tables], as sender and receiver know
    it; groups are numbered as they come."""
    groups = np.empty(ids.shape[::-1], np.uint32)
    for own, column in zip(groups, ids.T, strict=True):
        _, first, of_row = np.unique(column, return_index=True, return_inverse=True)
        own[:] = np.argsort(np.argsort(first))[of_row]
    return groups


def frame(
    lookups: torch.Tensor,
    bounds: Sequence[float],
    groups: Groups | None = None,
    fixed_width: bool = False,
    only: int | None = None,
) -> _native.Frame:
    """The frame of lookups [rows, tables, dim], or of one table's, in place."""
    rows, count, dim = lookups.shape
    tables = range(count) if only is None else [only]
    coded = [(_native.ERROR_BOUNDED, dim, bounds[table], fixed_width) for table in tables]
    columns = lookups.view(rows, count * dim), 0, rows, tables[0] * dim
    place = _native.CodedFeatures(coded), *columns
    if groups is None:
        return _native.Frame.side_by_side(*place)
    ids = torch.from_numpy(groups[list(tables)].astype(np.int64)).view(-1)  # equal where rows are
    equal = _native.EqualBags(None, ids, [(rows, rows, True)] * len(tables))
    return _native.Frame.side_by_side(*place, equal, list(range(len(tables))))


def encode(of_frame: _native.Frame, out: torch.Tensor) -> int:
    """Writes a frame and returns its size."""
    size = _native.encode_frame(of_frame, out)
    assert size <= len(out)
    return size


def decode(data: torch.Tensor, size: int, of_frame: _native.Frame) -> None:
    """Reads a frame into its tables."""
    _native.decode_frame(data[:size], of_frame)


def room(lookups: torch.Tensor) -> torch.Tensor:
    """Memory for any frame of these lookups."""
    size = HEAD_BYTES + lookups.nbytes + 9 * lookups.shape[1]
    return torch.empty(size, dtype=torch.uint8)


def round_trip(lookups: torch.Tensor, bounds: Sequence[float]) -> tuple[torch.Tensor, int]:
    """What arrives of lookups [rows, tables, dim], and the bytes of their message."""
    arrived, data = torch.empty_like(lookups), room(lookups)
    size = encode(frame(lookups, bounds), data)
    decode(data, size, frame(arrived, bounds))
    return arrived, size

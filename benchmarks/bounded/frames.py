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
) -> tuple:
    """The frame of lookups [rows, tables, dim], or of one table's, in place; `groups` have to stay
    as long."""
    assert lookups.is_contiguous() and lookups.dtype == torch.float32
    rows, count, dim = lookups.shape
    tables = range(count) if only is None else [only]
    coded = [(_native.ERROR_BOUNDED, dim, bounds[table], fixed_width) for table in tables]
    addresses = [lookups.data_ptr() + table * dim * lookups.itemsize for table in tables]
    known = []
    if groups is not None:
        known = [(groups[table].ctypes.data, int(groups[table].max()) + 1) for table in tables]
    counts, strides = [rows] * len(tables), [count * dim] * len(tables)
    return _native.CodedFeatures(coded), addresses, counts, strides, known


def encode(of_frame: tuple, out: npt.NDArray[np.uint8]) -> int:
    """Writes a frame and returns its size."""
    size = _native.encode_frame(of_frame, out.ctypes.data, len(out))
    assert size <= len(out)
    return size


def decode(data: npt.NDArray[np.uint8], size: int, of_frame: tuple) -> None:
    """Reads a frame into its tables."""
    _native.decode_frame(data.ctypes.data, size, of_frame)


def room(lookups: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Memory for any frame of these lookups."""
    return np.empty(HEAD_BYTES + lookups.nbytes + 9 * lookups.shape[1], np.uint8)


def round_trip(lookups: torch.Tensor, bounds: Sequence[float]) -> tuple[torch.Tensor, int]:
    """What arrives of lookups [rows, tables, dim], and the bytes of their message."""
    arrived, data = torch.empty_like(lookups), room(lookups)
    size = encode(frame(lookups, bounds), data)
    decode(data, size, frame(arrived, bounds))
    return arrived, size

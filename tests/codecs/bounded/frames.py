"""Frames of one error-bounded table, by the compiled core."""

from collections.abc import Sequence

import numpy as np

from tests.codecs.bounded.reference import Floats
from torchrec_bls import _native

ERROR_BOUNDED = 6
HEAD_BYTES = 28 + 1


def _frame(
    rows: Floats, bound: float, groups: Sequence[int] | None
) -> "tuple[_native.Frame, object]":
    assert rows.size == 0 or rows.shape[1] < 2 or rows.strides[1] == rows.itemsize
    of_row = np.array([] if groups is None else groups, np.uint32)
    address = 0 if groups is None else of_row.ctypes.data
    count = 0 if groups is None else max(groups, default=-1) + 1
    stride = rows.strides[0] // rows.itemsize
    count_of_rows, columns = rows.shape
    features = _native.CodedFeatures([(ERROR_BOUNDED, columns, bound, False)])
    frame = (features, [rows.ctypes.data], [count_of_rows], [stride], [(address, count)])
    return frame, of_row


def encode_frame(rows: Floats, bound: float, groups: Sequence[int] | None = None) -> bytes:
    frame, owner = _frame(rows, bound, groups)
    out = np.zeros(_native.encode_frame(frame, 0, 0), np.uint8)
    assert _native.encode_frame(frame, out.ctypes.data, len(out)) == len(out)
    del owner  # was needed until here
    return out.tobytes()


def decode_frame(
    data: bytes, shape: tuple[int, int], bound: float, groups: Sequence[int] | None = None
) -> Floats:
    out = np.full(shape, 7, np.float32)
    frame, owner = _frame(out, bound, groups)
    arrived = np.frombuffer(data, np.uint8)
    _native.decode_frame(arrived.ctypes.data, len(data), frame)
    del owner
    return out

"""Frames of one error-bounded table, by the compiled core."""

from collections.abc import Sequence

import numpy as np
import torch

from tests.codecs.bounded.reference import Floats
from torchrec_bls import _native

ERROR_BOUNDED = 6
HEAD_BYTES = 28 + 1


def _frame(rows: Floats, bound: float, groups: Sequence[int] | None) -> _native.Frame:
    features = _native.CodedFeatures([(ERROR_BOUNDED, rows.shape[1], bound, False)])
    place = features, torch.from_numpy(rows), 0, len(rows), 0
    if groups is None:
        return _native.Frame.side_by_side(*place)
    ids = torch.tensor(groups, dtype=torch.int64)  # equal where rows are
    equal = _native.EqualBags(None, ids, [(len(ids), len(ids), True)])
    return _native.Frame.side_by_side(*place, equal, [0])


def encode_frame(rows: Floats, bound: float, groups: Sequence[int] | None = None) -> bytes:
    frame = _frame(rows, bound, groups)
    out = torch.zeros(_native.encode_frame(frame), dtype=torch.uint8)
    assert _native.encode_frame(frame, out) == len(out)
    return out.numpy().tobytes()


def decode_frame(
    data: bytes, shape: tuple[int, int], bound: float, groups: Sequence[int] | None = None
) -> Floats:
    out = np.full(shape, 7, np.float32)
    arrived = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    _native.decode_frame(arrived, _frame(out, bound, groups))
    return out

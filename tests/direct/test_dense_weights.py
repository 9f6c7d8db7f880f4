"""What stands behind a segment's tables is read as dense weights, or refused with a reason."""

import json
import struct
from typing import Any

import pytest
import torch

from torchrec_bls import _native
from torchrec_bls.direct.dense_weights import behind, dense_parts, dense_weights

BEGIN = _native.FIRST_TABLE_OFFSET
GOOD: list[Any] = ["w", "float32", [2, 3], 0]


def segment_of(parts: Any, size: int) -> _native.TableSegment:
    return _native.TableSegment.create((2, "1", bytes(32)), parts, size, False)


def with_directory(text: bytes, magic: bytes = b"tbbldw01", data_bytes: int = 64) -> Any:
    head = torch.frombuffer(
        bytearray(struct.pack("<8sQ", magic, len(text)) + text), dtype=torch.uint8
    )
    return segment_of([(head, BEGIN)], behind(BEGIN + head.nbytes) + data_bytes)


def test_weights_come_back() -> None:
    weights = {
        "w": torch.arange(6.0).view(2, 3),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "none": torch.empty(0, 4),
    }
    parts, size = dense_parts(weights, BEGIN)
    found = dense_weights(segment_of(parts, size), BEGIN)
    assert found is not None and found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("directory", "reason"),
    [
        ([GOOD], None),
        ("[" * 10**5 + "]" * 10**5, r"the directory: \[0\]\[0\]: expected str"),
        ("[Infinity]", "is no JSON"),
        ({"w": 1}, "the directory: expected array, got"),
        ([["w", "float32", [2, 3]]], r"the directory: \[0\]: expected array of length 4"),
        ([["w", "float32", [2, -3], 0]], r"\[0\]\[2\]\[1\]: expected int >= 0, got -3"),
        ([["w", "float32", [2**62, 2**62], 0]], "'w' has .* bytes at 0, which are not there"),
        ([["w", "float32", [2, 3], 2**62]], "'w' has 24 bytes at"),
        ([["w", "float32", [2, 3], -64]], "expected int >= 0, got -64"),
        ([["w", "float32", [2, 3], 1]], "'w' has 24 bytes at 1, which are not there"),
        ([["w", "float32", [2**70], 0]], "expected int <= 9223372036854775807"),
        ([["w", "nn", [2, 3], 0]], "'w' is of nn, which is no dtype"),
        ([], "dense weights end at byte"),
    ],
)
def test_a_directory_that_is_none(directory: Any, reason: str | None) -> None:
    text = directory if isinstance(directory, str) else json.dumps(directory)
    segment = with_directory(text.encode())
    if reason is None:
        assert (dense_weights(segment, BEGIN) or {})["w"].shape == (2, 3)
        return
    with pytest.raises(ValueError, match=reason):
        dense_weights(segment, BEGIN)


def test_something_else_behind_the_tables() -> None:
    with pytest.raises(ValueError, match="no dense weights"):
        dense_weights(with_directory(b"[]", magic=b"tbbldw02"), BEGIN)

"""Our rows of INT8 are FBGEMM's, bit for bit."""

from collections.abc import Iterator
from math import inf, nan

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import DataType

from torchrec_bls import _native
from torchrec_bls.quant.stored_tables import StoredTable, _stored

_INSTRUCTION_SETS = _native.instruction_sets()
# Exponents of base 2: of subnormal numbers, of float16's subnormal and largest ones, and beyond.
_MAGNITUDES = st.sampled_from([-140, -30, -24, -16, -14, -7, -3, 0, 4, 12, 15, 16, 23, 24, 30, 100])


@pytest.fixture(params=_INSTRUCTION_SETS, autouse=True, scope="module")
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    _native.use_instruction_set(request.param)
    yield
    _native.use_instruction_set(_INSTRUCTION_SETS[-1])


def by_fbgemm(rows: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """Rows as they are stored: FBGEMM's with scale and shift in front, and zeros behind."""
    fused = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(rows, 8)
    together = torch.cat([fused[:, -4:], fused[:, :-4]], dim=1)
    return torch.nn.functional.pad(together, (0, row_bytes - together.shape[1]))


def by_us(rows: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """As a publication stores them: what is not ours is FBGEMM's."""
    table = StoredTable(
        "t", len(rows), rows.shape[1], DataType.INT8, row_bytes, 4 + rows.shape[1], 0
    )
    return _stored(table, rows)


@given(
    seed=st.integers(0, 2**32 - 1),
    pairs=st.integers(1, 75),
    centre=_MAGNITUDES,
    width=_MAGNITUDES,
    padding=st.integers(0, 20),
    half=st.booleans(),
)
def test_bits(seed: int, pairs: int, centre: int, width: int, padding: int, half: bool) -> None:
    """Of rows of all magnitudes, around values of all magnitudes, some of float16. FBGEMM wants an
    even number of columns."""
    columns = 2 * pairs
    random = np.random.default_rng(seed)
    values = random.standard_normal((20, columns)) * 2.0**width
    values += random.standard_normal((20, 1)) * 2.0**centre * random.integers(0, 2, (20, 1))
    rows = torch.from_numpy(values.astype(np.float32))
    if half:
        rows = rows.half().float().nan_to_num(0, 0, 0)
    out = torch.full((20, 4 + columns + padding), 77, dtype=torch.uint8)
    stored = _native.store_int8_rows(rows, out)
    expected = by_fbgemm(rows, out.shape[1])
    assert torch.equal(out[:stored], expected[:stored])
    assert torch.equal(by_us(rows, out.shape[1]), expected)


@pytest.mark.parametrize(
    "row",
    [
        [0.0] * 70,
        [0.1] * 70,  # its float16 is less
        [0.3] * 70,  # and here more
        [1000.3] * 69 + [1000.31],
        [-1.0, 1.0],
        [0.5 + step for step in range(256)],  # halves are rounded to even
        [65504.0, 65504.0],
        [-65504.0, 65504.0],
        [-1e-45, 1e-45],
        [-6e-8, 6e-8],
        [0.0, 254.5],
        [0.0, 1.0, 2.0, 0.0],
        [4e4, 1.6e7],
    ],
)
def test_rows_at_the_borders_of_float16(row: list[float]) -> None:
    rows = torch.tensor([row] * 3)
    out = torch.zeros(3, 4 + len(row) + 3, dtype=torch.uint8)
    assert _native.store_int8_rows(rows, out) == 3
    assert torch.equal(out, by_fbgemm(rows, out.shape[1]))


@pytest.mark.parametrize(
    "value", [nan, inf, -inf, 2.0**126, -70000.0, 2e7, -0.0], ids=lambda value: str(value)
)
def test_what_is_left_to_fbgemm(value: float) -> None:
    """The rows before it are stored, and nothing after them is touched."""
    rows = torch.rand(5, 8)
    rows[3, 4] = value
    out = torch.full((5, 14), 77, dtype=torch.uint8)
    assert _native.store_int8_rows(rows, out) == 3
    assert torch.equal(out[:3], by_fbgemm(rows[:3], 14))
    assert bool((out[3:] == 77).all())
    if value == value and abs(value) < inf:
        assert torch.equal(by_us(rows, 14), by_fbgemm(rows, 14))


@pytest.mark.parametrize(
    ("rows", "out", "says"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 7, dtype=torch.uint8), "rows"),
        (torch.zeros(2, 3), torch.zeros(3, 7, dtype=torch.uint8), "out"),
        (torch.zeros(2, 3), torch.zeros(2, 6, dtype=torch.uint8), "without room"),
        (torch.zeros(2, 0), torch.zeros(2, 6, dtype=torch.uint8), "without room"),
        (torch.zeros(2, 6)[:, ::2], torch.zeros(2, 7, dtype=torch.uint8), "rows"),
        (torch.zeros(2, 3), torch.zeros(2, 7), "out"),
    ],
)
def test_what_can_not_be_stored(rows: torch.Tensor, out: torch.Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _native.store_int8_rows(rows, out)

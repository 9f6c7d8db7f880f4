"""Error-bounded rows, on each instruction set, against numpy and against exact arithmetic."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.codecs.bounded import reference
from tests.codecs.bounded.frames import HEAD_BYTES, decode_frame, encode_frame
from tests.codecs.bounded.reference import Floats
from torchrec_bls.errors import ProtocolError

BOUND = 0.01

shapes = hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=70)
elements = st.one_of(
    st.floats(-1, 1, width=32),
    st.floats(-(2.0**7), 2.0**7, width=32),
    st.floats(-(2.0**10), 2.0**10, width=32),
    st.floats(width=32),
)
matrices = st.one_of(
    *(
        hnp.arrays(np.float32, shapes, elements=e, fill=st.just(0.0))
        for e in (st.floats(-0.25, 0.25, width=32), st.floats(-2, 2, width=32), elements)
    )
)
bounds = st.floats(2.0**-126, 2.0**110, width=32)


def lookups(rows: int, columns: int, deviation: float, distinct: int) -> Floats:
    """Rows of a table as a batch looks them up, the first ones most often."""
    random = np.random.default_rng(rows + columns)
    table = random.normal(0, deviation, (distinct, columns)).astype(np.float32)
    return table[np.minimum(random.zipf(1.3, rows), distinct) - 1]


def groups_of(rows: Floats) -> list[int]:
    """The group of each row, those that are equal bit for bit."""
    seen: dict[bytes, int] = {}
    return [seen.setdefault(row.tobytes(), len(seen)) for row in rows]


def check_as_numpy(rows: Floats, bound: float, groups: list[int] | None = None) -> None:
    expected = reference.encode(rows, bound, groups)
    frame = encode_frame(rows, bound, groups)
    assert frame[HEAD_BYTES:] == expected
    decoded = decode_frame(frame, rows.shape, bound, groups)
    assert decoded.tobytes() == reference.decode(expected, rows.shape, bound, groups).tobytes()


def test_bytes_and_values_are_those_of_numpy(instruction_set: str) -> None:
    @settings(max_examples=100)
    @given(matrices, st.sampled_from([0.003, 0.01, 0.3]), st.booleans())
    def check(rows: Floats, bound: float, grouped: bool) -> None:
        check_as_numpy(rows, bound, groups_of(rows) if grouped else None)

    check()


@pytest.mark.parametrize("deviation", [0.002, 0.05, 0.4, 2.0, 50.0, 1e4])
def test_batches_have_the_bytes_of_numpy(instruction_set: str, deviation: float) -> None:
    rows = lookups(1100, 16, deviation, 90)
    rows[7, 3], rows[99, 15] = np.nan, -np.inf
    check_as_numpy(rows, BOUND)
    check_as_numpy(rows, BOUND, groups_of(rows))


@settings(max_examples=300)
@given(matrices, bounds)
def test_the_error_is_within_the_bound(rows: Floats, bound: float) -> None:
    decoded = decode_frame(encode_frame(rows, bound), rows.shape, bound)
    same = decoded.view(np.uint32) == rows.view(np.uint32)  # NaN and infinities, too
    with np.errstate(invalid="ignore"):
        error = np.abs(decoded.astype(np.float64) - rows.astype(np.float64))
    assert (same | (error <= np.float64(np.float32(bound)))).all()


@given(matrices, bounds)
def test_encoding_a_decoded_row_again_does_not_change_it(rows: Floats, bound: float) -> None:
    first = encode_frame(rows, bound)
    once = decode_frame(first, rows.shape, bound)
    second = encode_frame(once, bound)
    # A value next to the greatest of eight bits may have had 16 the first time.
    assume(first[HEAD_BYTES] == second[HEAD_BYTES])
    assert decode_frame(second, rows.shape, bound).tobytes() == once.tobytes()


def test_columns_of_a_wider_tensor(instruction_set: str) -> None:
    batch = lookups(50, 70, 0.2, 20)
    table = batch[:, 13:50]
    assert encode_frame(table, BOUND) == encode_frame(table.copy(), BOUND)


@settings(max_examples=400)
@given(st.data())
def test_damage_is_refused(data: st.DataObject) -> None:
    rows = lookups(1100, 9, data.draw(st.sampled_from([0.05, 3.0])), 200)
    frame = bytearray(encode_frame(rows, BOUND))
    at = data.draw(st.integers(0, len(frame) - 1))
    kind = data.draw(st.sampled_from(["changed", "cut", "longer"]))
    if kind == "changed":
        frame[at] ^= data.draw(st.integers(1, 255))
    frame = frame[:at] if kind == "cut" else frame + b"\0" if kind == "longer" else frame
    with pytest.raises(ProtocolError, match="frame of encoded rows"):
        decode_frame(bytes(frame), rows.shape, BOUND)


def test_other_bounds_are_refused() -> None:
    frame = encode_frame(np.ones((2, 3), np.float32), 0.01)
    with pytest.raises(ProtocolError, match="made with other error bounds"):
        decode_frame(frame, (2, 3), 0.02)


@pytest.mark.parametrize("bound", [0.0, -0.1, np.nan, np.inf, 1e-40, 2.0**111])
def test_bounds_that_are_none_are_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="error bound is"):
        encode_frame(np.ones((2, 3), np.float32), bound)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing_takes_no_bytes(shape: tuple[int, int]) -> None:
    frame = encode_frame(np.ones(shape, np.float32), BOUND)
    assert len(frame) == HEAD_BYTES
    decode_frame(frame, shape, BOUND)

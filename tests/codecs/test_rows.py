"""Codecs of rows, on each instruction set, against numpy and against exact arithmetic."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.codecs import reference
from tests.codecs.conftest import INSTRUCTION_SETS
from tests.tiers import slow_but
from torchrec_bls.codecs.rows import Codec, decode, encode
from torchrec_bls.errors import ProtocolError

BITS = {Codec.UINT8: 8, Codec.UINT4: 4, Codec.UINT2: 2}
# All codecs without AVX-512 as well.
KEPT = [
    ("portable", Codec.UINT4),
    ("portable", Codec.UINT2),
    ("avx2", Codec.UINT8),
    ("avx512", Codec.UINT2),
]

shapes = hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=150)
any_floats = st.floats(width=32)
usual = st.floats(-1e3, 1e3, width=32)
# Where scales rounded up could lead to infinities.
large = st.floats(2.0**126, width=32, allow_infinity=False)
tiny = st.floats(-(2.0**-120), 2.0**-120, width=32)
matrices = st.one_of(
    *(hnp.arrays(np.float32, shapes, elements=e) for e in (any_floats, usual, tiny, large))
)


def in_numpy(rows: torch.Tensor) -> reference.Floats:
    return rows.numpy()


@pytest.mark.parametrize(
    ("instruction_set", "codec"),
    slow_but(KEPT, product(INSTRUCTION_SETS, BITS)),
    indirect=["instruction_set"],
)
def test_bytes_and_values_are_those_of_numpy(instruction_set: str, codec: Codec) -> None:
    @settings(max_examples=150)
    @given(matrices)
    def check(rows: reference.Floats) -> None:
        expected = reference.encode(rows, BITS[codec])
        data = encode(torch.from_numpy(rows), codec)
        assert data.numpy().tobytes() == expected
        decoded = decode(data, codec, torch.empty(rows.shape))
        assert (
            in_numpy(decoded).tobytes()
            == reference.decode(expected, rows.shape, BITS[codec]).tobytes()
        )

    check()


@pytest.mark.parametrize("codec", BITS)
def test_rows_that_are_not_finite_come_back_bit_for_bit(instruction_set: str, codec: Codec) -> None:
    rows = torch.randn(9, 21)
    rows[1, 20] = torch.inf
    rows[2, 0] = -torch.inf
    rows[4, 7] = torch.nan
    rows[5, 3] = torch.tensor([0x7FA00001], dtype=torch.int32).view(torch.float32)  # signaling
    rows[6, 1], rows[6, 2] = 3e38, -3e38
    decoded = decode(encode(rows, codec), codec, torch.empty_like(rows))
    for row in (1, 2, 4, 5, 6):
        assert decoded[row].numpy().tobytes() == rows[row].numpy().tobytes()
    for row in (0, 3, 7, 8):
        assert torch.isfinite(decoded[row]).all()


@pytest.mark.parametrize("codec", BITS)
def test_finite_rows_stay_finite_up_to_the_largest_float(
    instruction_set: str, codec: Codec
) -> None:
    generator = torch.Generator().manual_seed(0)
    most = torch.finfo(torch.float32).max
    for sign in (1, -1):
        for greatest in (most, 2.0**127, 2.0**127 * (1 - 2.0**-24)):
            # Between two powers of two, so that about every other scale is rounded up.
            widths = 2.0**125 * (1 + torch.rand(500, 1, generator=generator) * 0.999)
            rows = sign * (greatest - widths * torch.rand(500, 21, generator=generator))
            rows[:, :1], rows[:, 1] = sign * (greatest - widths), sign * greatest
            decoded = decode(encode(rows, codec), codec, torch.empty_like(rows))
            assert decoded.isfinite().all()
            assert torch.equal(decoded, rows) == (greatest >= 2.0**127)


@pytest.mark.parametrize("codec", BITS)
def test_constant_rows_are_exact(instruction_set: str, codec: Codec) -> None:
    rows = torch.tensor([0.0, -1.5, 1e-44, 3e38])[:, None].repeat(1, 17)
    assert torch.equal(decode(encode(rows, codec), codec, torch.empty_like(rows)), rows)


@pytest.mark.parametrize("codec", slow_but([Codec.UINT4], BITS))
@given(rows=hnp.arrays(np.float32, shapes, elements=usual))
def test_the_error_is_half_a_step(codec: Codec, rows: reference.Floats) -> None:
    decoded = in_numpy(
        decode(encode(torch.from_numpy(rows), codec), codec, torch.empty(rows.shape))
    )
    exact = rows.astype(np.float64)
    step = np.ptp(exact, axis=1, keepdims=True) / (2 ** BITS[codec] - 1)
    rounding = 4 * np.finfo(np.float32).eps * np.abs(exact).max(axis=1, keepdims=True)
    # The scale's rounding counts once for each step that a code stands for.
    rounding += step * 2.0 ** (BITS[codec] - 24) * 2 ** BITS[codec]
    assert (np.abs(decoded - exact) <= step / 2 * (1 + 1e-5) + rounding + 2.0**-126).all()


@pytest.mark.parametrize("codec", [Codec.UINT8, Codec.UINT4])
@pytest.mark.parametrize("deviation", [1e-3, 1e-6, 1e-7, 1e-9, 1e-12])
def test_small_rows_are_quantized_as_well_as_in_exact_arithmetic(
    codec: Codec, deviation: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 64, generator=generator) * deviation
    decoded = decode(encode(rows, codec), codec, torch.empty_like(rows)).double()
    exact = rows.double()
    least = exact.min(1, keepdim=True).values
    step = (exact.max(1, keepdim=True).values - least) / (2 ** BITS[codec] - 1)
    ideal = ((exact - least) / step).round() * step + least
    error, least_error = (decoded - exact).norm(), (ideal - exact).norm()
    assert error <= 1.01 * least_error


@pytest.mark.parametrize("codec", slow_but([Codec.UINT4], BITS))
@given(rows=hnp.arrays(np.float32, shapes, elements=usual))
def test_encoding_a_decoded_row_again_does_not_change_it(
    codec: Codec, rows: reference.Floats
) -> None:
    once = decode(encode(torch.from_numpy(rows), codec), codec, torch.empty(rows.shape))
    twice = decode(encode(once, codec), codec, torch.empty(rows.shape))
    assert torch.equal(twice, once)


@pytest.mark.parametrize("codec", Codec)
def test_columns_of_a_wider_tensor(instruction_set: str, codec: Codec) -> None:
    batch = torch.randn(6, 70)
    table = batch[:, 13:50]
    data = encode(table, codec)
    assert torch.equal(data, encode(table.contiguous(), codec))
    out = torch.zeros(6, 70)
    decode(data, codec, out[:, 13:50])
    assert torch.equal(out[:, 13:50], decode(data, codec, torch.empty(6, 37)))
    assert out[:, :13].count_nonzero() == out[:, 50:].count_nonzero() == 0


def interesting_bits() -> torch.Tensor:
    """All halves' values with their neighbours and midpoints, and random bits."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    values = [halves.view(torch.float16).float(), halves.view(torch.bfloat16).float()]
    bits = torch.cat([value.view(torch.int32) for value in values])
    near = [bits + change for change in (-4097, -4096, -4095, -1, 0, 1, 4095, 4096, 32767, 32768)]
    random = torch.randint(-(2**31), 2**31 - 1, (100_001,), dtype=torch.int32)
    return torch.cat([*near, random])


@pytest.mark.parametrize(
    ("codec", "dtype"), [(Codec.FP16, torch.float16), (Codec.BF16, torch.bfloat16)]
)
def test_halves_are_those_of_torch(instruction_set: str, codec: Codec, dtype: torch.dtype) -> None:
    rows = interesting_bits().view(torch.float32)[None]
    expected = rows.to(dtype)
    data = encode(rows, codec)
    numbers = ~expected.isnan()
    assert torch.equal(
        data.view(torch.int16)[numbers[0]], expected.view(torch.int16)[0][numbers[0]]
    )
    decoded = decode(data, codec, torch.empty_like(rows))
    assert torch.equal(decoded[numbers], expected.float()[numbers])
    assert decoded[~numbers].isnan().all()


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing_takes_no_bytes(codec: Codec, shape: tuple[int, int]) -> None:
    data = encode(torch.empty(shape), codec)
    assert data.numel() == 0
    decode(data, codec, torch.empty(shape))


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("change", [-1, 1, 4])
def test_bytes_too_few_or_too_many_are_refused(codec: Codec, change: int) -> None:
    data = encode(torch.randn(3, 5), codec)
    other = torch.zeros(data.numel() + change, dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="bytes"):
        decode(other, codec, torch.empty(3, 5))


@pytest.mark.parametrize("codec", BITS)
def test_escaped_rows_without_their_values_are_refused(codec: Codec) -> None:
    data = encode(torch.full((2, 5), torch.nan), codec)
    with pytest.raises(ProtocolError, match="lack the values of an escaped row"):
        decode(data[:-1].clone(), codec, torch.empty(2, 5))


def test_other_tensors_are_refused() -> None:
    for rows in (torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2).t()[:1]):
        if rows.dim() == 2 and rows.dtype == torch.float32:
            rows = torch.zeros(3, 4).t()
        with pytest.raises(ValueError, match="rows"):
            encode(rows, Codec.UINT8)
    with pytest.raises(ValueError, match="contiguous tensor of torch"):
        decode(torch.zeros(8), Codec.UINT8, torch.empty(1, 1))

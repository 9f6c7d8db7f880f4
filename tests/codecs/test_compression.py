"""Which stages are the fastest, by equation 2."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_bls.codecs.compression import Compression, Measured, chosen, ranked, speed_up

POSITIVE = st.floats(1e-3, 1e12)
MEASURED = st.builds(Measured, POSITIVE, POSITIVE, POSITIVE)


def test_what_the_stages_do() -> None:
    assert [stages.value for stages in Compression if stages.bounded] == [
        "unique, fixed width",
        "unique, Huffman",
    ]
    assert [stages.value for stages in Compression if not stages.unique] == ["as they are"]


def test_seconds_of_a_byte_are_the_inverse_of_equation_2() -> None:
    # LZ of the paper: 4 GB/s, ratio 11.19, 40.5 GB/s compressed, 205.4 decompressed.
    measured = Measured(11.19, 40.5e9, 205.4e9)
    speed_up = 1 / (1 / 11.19 + 4 * (1 / 40.5 + 1 / 205.4))
    assert 1 / (4e9 * measured.seconds_per_byte(4e9)) == pytest.approx(speed_up)


@given(st.dictionaries(st.sampled_from(Compression), MEASURED), POSITIVE)
def test_the_fastest_come_first(measured: dict[Compression, Measured], link: float) -> None:
    order = ranked(measured, link)
    assert sorted(order, key=list(Compression).index) == sorted(
        measured, key=list(Compression).index
    )
    speeds = [speed_up(stages, measured[stages], link) for stages in order]
    assert speeds[1:] == sorted(speeds[1:], reverse=True)
    assert all(speed <= 1.0501 * speeds[0] for speed in speeds)
    # None is both simpler than the first one and as near to the fastest.
    simpler = [stages for stages in order[1:] if _complexity(stages) < _complexity(order[0])]
    assert all(1.0499 * speed_up(each, measured[each], link) <= max(speeds) for each in simpler)


def _complexity(stages: Compression) -> int:
    return list(Compression).index(stages)


def test_a_few_percent_are_no_reason_for_more_stages() -> None:
    measured = {
        Compression.FIXED: Measured(20, 4e9, 4e9),
        Compression.HUFFMAN: Measured(20.5, 4e9, 4e9),
    }
    assert ranked(measured, 1e6) == [Compression.FIXED, Compression.HUFFMAN]
    measured[Compression.HUFFMAN] = Measured(22, 4e9, 4e9)
    assert ranked(measured, 1e6) == [Compression.HUFFMAN, Compression.FIXED]


def test_of_equally_fast_stages_the_simplest_comes_first() -> None:
    same = Measured(1.0, 1e30, 1e30)  # as fast as no codec at all
    assert ranked(dict.fromkeys(reversed(Compression), same), 1e9) == list(Compression)
    assert ranked({}, 1e9) == []


def test_a_slow_link_wants_ratio_and_a_fast_one_speed() -> None:
    measured = {
        Compression.UNIQUE: Measured(2, 8e9, 8e9),
        Compression.HUFFMAN: Measured(30, 1e9, 2e9),
    }
    assert ranked(measured, 1e8)[0] is Compression.HUFFMAN
    assert ranked(measured, 1e10)[0] is Compression.UNIQUE


@pytest.mark.parametrize("bad", [0, -1.0, math.inf, math.nan, "1", None])
def test_numbers_that_are_not_positive(bad: Any) -> None:
    for name in ("ratio", "encode", "decode"):
        numbers = {"ratio": 1.0, "encode": 1.0, "decode": 1.0, name: bad}
        with pytest.raises(ValueError, match=f"^{name} is .*, but must be a positive number"):
            Measured(**numbers)
    with pytest.raises(ValueError, match=r"the link has .* bytes per second, but must have"):
        ranked({}, bad)


@pytest.mark.parametrize("bad", [0.5, 0, math.inf, math.nan, "1", None])
def test_ranks_per_core_below_one(bad: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^ranks_per_core is .*, but must be a number of at least 1"
    ):
        ranked({}, 1e9, bad)


def test_ranks_that_share_a_core_encode_more_slowly() -> None:
    measured = Measured(4, 8e9, 8e9)
    # 1/4 + 1/8 + 1/8 of the link's time for a byte, and 1/4 + 2 (1/8 + 1/8).
    assert speed_up(Compression.UNIQUE, measured, 1e9) == pytest.approx(2)
    assert speed_up(Compression.UNIQUE, measured, 1e9, 2) == pytest.approx(4 / 3)
    assert ranked(
        {Compression.AS_THEY_ARE: Measured(1, 9e9, 9e9), Compression.UNIQUE: measured}, 1e9, 4
    )[0] is (Compression.AS_THEY_ARE)


def test_rows_as_they_are_pass_no_codec() -> None:
    assert speed_up(Compression.AS_THEY_ARE, Measured(0.99, 1e9, 1e9), 1e9, 8) == 1.0


def test_one_table_is_encoded_only_where_that_pays_for_all_of_its_message() -> None:
    link = 1e9
    large = {
        Compression.AS_THEY_ARE: Measured(1, 4e9, 4e9),
        Compression.UNIQUE: Measured(1.01, 3e9, 3e9),
    }
    small = {**large, Compression.UNIQUE: Measured(100, 5e10, 5e10)}
    assert [ranked(each, link)[0] for each in (small, large)] == [
        Compression.UNIQUE,
        Compression.AS_THEY_ARE,
    ]
    # Of the link's time for a byte, 0.05 and 1.5 in a frame, and 2 as they are.
    two = {"small": small, "large": large}
    assert chosen(two, link) == {"small": Compression.UNIQUE, "large": Compression.AS_THEY_ARE}
    four = {**two, "second": large, "third": large}
    assert set(chosen(four, link).values()) == {Compression.AS_THEY_ARE}
    # Two ranks on a core take 0.09 and 2.
    assert set(chosen(two, link, 2).values()) == {Compression.AS_THEY_ARE}
    assert chosen({}, link) == {}

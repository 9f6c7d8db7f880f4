"""What rows say of a table, against figures done by hand."""

import numpy as np
import pytest

from tests.analysis.sampled import lookup, random_weights
from torchrec_bls.analysis.frames import rounded
from torchrec_bls.analysis.patterns import (
    distinct,
    entropy,
    homogenization,
    looked_up,
    zero_rows,
)


def floats(*rows: list[float]) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    return np.array(rows, np.float32)


def test_rows_are_distinct_by_their_bits_but_for_the_sign_of_zeros() -> None:
    rows = floats([1, 2], [1, 2], [2, 1], [0, 0], [-0.0, 0], [0, 1e-30], [np.nan, 1], [np.nan, 1])
    assert len(distinct(rows)) == 5
    assert len(distinct(rows[:0])) == 0
    assert sorted(map(tuple, distinct(rows[:3]).tolist())) == [(1, 2), (2, 1)]


@pytest.mark.parametrize(
    ("before", "after", "printed"),
    [
        (110, 68, 0.618182),
        (110, 69, 0.627273),
        (108, 76, 0.703704),
        (67, 63, 0.940299),
        (19, 19, 1),
        (1055, 484, 0.458768),
        (937, 795, 0.848453),
    ],
)
def test_the_papers_tables_print_one_minus_eta(before: int, after: int, printed: float) -> None:
    assert 1 - homogenization(before, after) == pytest.approx(printed, abs=1e-6)


def test_eta_of_rows_that_rounding_makes_equal() -> None:
    # At 0.01 steps are about 0.02: the first two rows become one, the third stays.
    rows = floats([0.1, 0.5], [0.101, 0.499], [0.9, 0.5])
    assert len(distinct(rows)) == 3
    assert len(distinct(rounded(rows, 0.01))) == 2
    assert homogenization(3, 2) == pytest.approx(1 / 3)
    assert homogenization(5, 5) == 0
    assert homogenization(0, 0) == 0


def test_rounded_rows_are_within_the_bound_and_stay_when_rounded_again() -> None:
    rows = random_weights(300)
    once = rounded(rows, 0.03)
    assert 0 < np.abs(once - rows).max() <= 0.03
    assert np.array_equal(rounded(once, 0.03), once)
    assert rounded(rows[:0], 0.03).shape == (0, 8)


def test_entropy() -> None:
    assert entropy(floats([1, 1, 1, 1])) == 0
    assert entropy(floats([1, 2, 3, 4])) == 2
    assert entropy(floats([1, 1], [2, 3])) == 1.5
    assert entropy(floats([1, 1, 1, 2])) == pytest.approx(2 - 0.75 * np.log2(3))
    assert entropy(floats([])) == 0


def test_zero_rows() -> None:
    assert zero_rows(floats([0, 0], [0, 1], [-0.0, 0])) == 2
    assert zero_rows(np.zeros((0, 4), np.float32)) == 0


def test_bags_without_ids_have_no_row_of_the_table() -> None:
    weights = random_weights()
    assert looked_up(lookup(weights, [[1], [], [2, 3]]), pooled=True).tolist() == [1, 0, 1]
    assert looked_up(lookup(weights, [[1], [], [2, 3]], False), pooled=False).tolist() == [1] * 3

"""Images of what fits together fit together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrec_bls.sharding.search.dual_feasible import dual_feasible


@given(st.lists(st.fractions(0, 1, max_denominator=60), min_size=1, max_size=8))
def test_numbers_that_fit_have_images_that_fit(numbers: list[object]) -> None:
    shares = np.array([float(number) for number in numbers])  # type: ignore[arg-type]
    if shares.sum() > 1:
        shares = shares / shares.sum()
    for images in dual_feasible(shares):
        assert images.shape == shares.shape
        assert images.min() >= 0
        assert images.sum() <= 1 + 1e-6


@pytest.mark.parametrize(
    ("shares", "least_ranks"), [([0.51] * 4, 4), ([0.34] * 6, 3), ([0.9, 0.9, 0.2, 0.2], 3)]
)
def test_some_function_tells_how_many_ranks_are_needed(
    shares: list[float], least_ranks: int
) -> None:
    most = max(images.sum() for images in dual_feasible(np.array(shares)))
    assert np.ceil(most - 1e-6) == least_ranks

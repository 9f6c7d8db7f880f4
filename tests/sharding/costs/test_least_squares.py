import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrec_bls.sharding.costs.fitting.least_squares import nonnegative, nonnegative_relative


@given(seed=st.integers(0, 10_000), columns=st.integers(1, 6))
def test_no_point_nearby_is_better(seed: int, columns: int) -> None:
    """The conditions of Karush, Kuhn and Tucker, which hold at the minimum and only there."""
    random = np.random.default_rng(seed)
    matrix, target = random.normal(size=(20, columns)), random.normal(size=20)
    x = nonnegative(matrix, target)
    gradient = matrix.T @ (matrix @ x - target)
    assert (x >= 0).all()
    assert np.abs(gradient[x > 0]).max(initial=0.0) < 1e-6
    assert gradient[x == 0].min(initial=0.0) > -1e-6


def test_relative_errors_find_the_small_times_too() -> None:
    random = np.random.default_rng(0)
    size = np.exp(random.uniform(0, 15, 200))
    matrix = np.stack([np.ones_like(size), size], axis=1)
    measured = (50.0 + 0.003 * size) * np.exp(random.normal(0, 0.02, 200))
    assert nonnegative_relative(matrix, measured) == pytest.approx([50.0, 0.003], rel=0.02)


def test_outliers_hardly_matter() -> None:
    size = np.exp(np.linspace(0, 15, 100))
    matrix = np.stack([np.ones_like(size), size], axis=1)
    measured = 50.0 + 0.003 * size
    measured[::10] *= 5
    assert nonnegative_relative(matrix, measured) == pytest.approx([50.0, 0.003], rel=0.1)

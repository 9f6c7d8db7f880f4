"""Times of batches are foreseen by what earlier ones took."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_bls.serve.predictor import Predictor

SIZES = [(samples, samples * ids) for samples in (1, 8, 32, 128) for ids in (26, 104)]


def test_known_costs_are_found() -> None:
    made = Predictor([(s, i, 8e-4 + 11e-6 * s + 0.3e-6 * i) for s, i in SIZES])
    assert made.costs == pytest.approx((8e-4, 11e-6, 0.3e-6), rel=1e-6)
    assert made.seconds(50, 1000) == pytest.approx(8e-4 + 50 * 11e-6 + 1000 * 0.3e-6)


def test_known_costs_are_found_among_noise() -> None:
    generator = np.random.default_rng(0)
    noise = generator.uniform(0.95, 1.05, len(SIZES))
    measured = [
        (s, i, n * (8e-4 + 11e-6 * s + 0.3e-6 * i)) for (s, i), n in zip(SIZES, noise, strict=True)
    ]
    made = Predictor(measured)
    for samples, ids, seconds in measured:
        assert made.seconds(samples, ids) == pytest.approx(seconds, rel=0.15)


seconds = st.one_of(st.just(0.0), st.floats(0, 100, allow_subnormal=True))


@given(
    st.lists(seconds, min_size=1, max_size=len(SIZES)),
    st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 10**6), seconds), max_size=40),
)
def test_costs_are_numbers(measured: list[float], later: list[tuple[int, int, float]]) -> None:
    made = Predictor([(*size, each) for size, each in zip(SIZES, measured, strict=False)])
    for samples, ids, each in later:
        made.observe(samples, ids, each)
        assert all(math.isfinite(cost) and cost >= 0 for cost in made.costs)
    if not later:
        assert any(cost > 0 for cost in made.costs)


def predictor() -> Predictor:
    return Predictor([(s, i, 1e-3 + 10e-6 * s) for s, i in SIZES])


def test_a_slowdown_is_followed() -> None:
    made = predictor()
    for _ in range(128):
        made.observe(32, 100, 3 * (1e-3 + 320e-6))
    assert made.correction == pytest.approx(3)
    assert made.seconds(8, 0) == pytest.approx(3 * (1e-3 + 80e-6))
    for _ in range(128):
        made.observe(32, 100, 1e-3 + 320e-6)
    assert made.correction == pytest.approx(1)


def test_most_batches_are_covered() -> None:
    made = predictor()
    generator = np.random.default_rng(1)
    times = (1e-3 + 320e-6) * generator.lognormal(0, 0.3, 640)
    covered = 0
    for number, each in enumerate(times):
        covered += number >= 128 and each <= made.seconds(32, 100)
        made.observe(32, 100, each)
    assert 0.85 <= covered / (len(times) - 128) <= 0.95


def test_one_slow_batch_of_many_changes_little() -> None:
    made = predictor()
    for number in range(128):
        made.observe(32, 100, 1.0 if number == 64 else 1e-3 + 320e-6)
    assert made.correction == pytest.approx(1)


def test_corrections_are_forgotten() -> None:
    made = predictor()
    for _ in range(12):
        made.observe(32, 100, 1.0)
    made.forget()
    assert made.correction == 1 and made.costs == predictor().costs
    for _ in range(8):
        made.observe(32, 100, 2 * (1e-3 + 320e-6))
    assert made.correction == pytest.approx(2)

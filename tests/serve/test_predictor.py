"""Times of batches are foreseen by what earlier ones took."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_bls.serve import predictor as predictor_module
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
    st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 10**6), seconds, seconds), max_size=40),
)
def test_costs_are_numbers(
    measured: list[float], later: list[tuple[int, int, float, float]]
) -> None:
    made = Predictor([(*size, each) for size, each in zip(SIZES, measured, strict=False)])
    for samples, ids, model_s, rest_s in later:
        made.observe(samples, ids, model_s, model_s + rest_s)
        made.observe_slack(model_s - rest_s)
        made.observe_end(rest_s - model_s)
        facts = *made.costs, made.slowdown, made.stretch, made.margin_s, made.safe_margin_s
        assert all(math.isfinite(cost) and cost >= 0 for cost in facts)
    if not later:
        assert any(cost > 0 for cost in made.costs)


def predictor() -> Predictor:
    return Predictor([(s, i, 1e-3 + 10e-6 * s) for s, i in SIZES])


EXPECTED = 1e-3 + 320e-6


def test_a_slowdown_is_followed() -> None:
    made = predictor()
    for _ in range(256):
        made.observe(32, 100, 3 * EXPECTED, 3 * EXPECTED)
    assert made.slowdown == pytest.approx(3) and made.stretch == pytest.approx(1)
    assert made.seconds(8, 0) == pytest.approx(3 * (1e-3 + 80e-6))
    for _ in range(256):
        made.observe(32, 100, EXPECTED, EXPECTED)
    assert made.slowdown == pytest.approx(1)


def test_what_comes_beside_the_model_is_a_share_of_its_time() -> None:
    made = predictor()
    for number in range(256):
        made.observe(32, 100, 2 * EXPECTED, (2 + 2 * (number % 2)) * EXPECTED)
    assert made.slowdown == pytest.approx(2) and made.stretch == pytest.approx(1.5)
    assert made.seconds(32, 100) == pytest.approx(2 * EXPECTED)


def test_as_good_as_all_ends_are_within_the_safe_margin() -> None:
    made = predictor()
    generator = np.random.default_rng(1)
    covered = 0
    for number, each in enumerate(generator.exponential(1e-3, 8192) - 5e-4):
        covered += number >= 1024 and each <= made.safe_margin_s
        made.observe_end(each)
    assert 0.99 <= covered / (8192 - 1024) <= 0.9995


@given(
    st.lists(st.integers(-20, 20), min_size=1, max_size=30),
    st.lists(st.integers(-20, 20), max_size=40),
)
def test_the_margin_is_the_least_with_few_late(delays: list[int], slacks: list[int]) -> None:
    """Against the definition: the mean over those admitted of the share of ends that are later."""
    made = predictor()
    for each in slacks:
        made.observe_slack(each / 16)
    for each in [*delays] * 32:
        made.observe_end(each / 16)

    def late(margin: int) -> float:
        admitted = [each for each in slacks if each >= margin]
        shares = [sum(end > each for end in delays) / len(delays) for each in admitted]
        return sum(shares) / max(1, len(shares))

    assert made.safe_margin_s == max(0, *delays) / 16
    margin = round(16 * made.margin_s)
    assert 0 <= margin <= max(0, *delays)
    assert late(margin + 1) <= 0.002
    assert margin == 0 or late(margin) > 0.002


def test_who_comes_with_much_time_left_needs_no_margin() -> None:
    made = predictor()
    for number in range(1024):
        made.observe_slack(15e-3 if number % 100 else 2e-3)
        made.observe_end(5e-3 * (number % 10 == 0))
    assert made.safe_margin_s == 5e-3
    # One of a hundred would be late in a tenth of all cases: 0.1 % of all.
    assert made.margin_s == 0
    for _ in range(256):
        made.observe_slack(2e-3)
        made.observe_end(0.0)
    assert made.margin_s == pytest.approx(2e-3)


def test_ends_before_the_prediction_need_no_margin() -> None:
    made = predictor()
    for _ in range(1024):
        made.observe_slack(0.0)
        made.observe_end(-1e-3)
    assert made.margin_s == made.safe_margin_s == 0


def test_ends_of_long_ago_need_no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(predictor_module.time, "monotonic", lambda: now)
    made = predictor()
    for _ in range(64):
        made.observe_slack(0.0)
        made.observe_end(0.5)
    assert made.safe_margin_s == 0.5
    now += 1.1
    for _ in range(32):
        made.observe_end(0.001)
    assert (made.margin_s, made.safe_margin_s) == (0, 0.001)


def test_one_slow_batch_of_many_changes_little() -> None:
    made = predictor()
    for number in range(256):
        seconds = 0.1 if number == 64 else EXPECTED
        made.observe(32, 100, seconds, seconds)
    assert made.slowdown == pytest.approx(1) and made.stretch < 1.5


def test_corrections_are_forgotten() -> None:
    made = predictor()
    for _ in range(64):
        made.observe(32, 100, 1.0, 2.0)
        made.observe_slack(0.5)
        made.observe_end(1.0)
    assert made.margin_s > 0 and made.safe_margin_s == 1
    made.forget()
    assert (made.slowdown, made.stretch, made.margin_s, made.safe_margin_s) == (1, 1, 0, 0)
    assert made.costs == predictor().costs
    for _ in range(16):
        made.observe(32, 100, 2 * EXPECTED, 2 * EXPECTED)
    assert made.slowdown == pytest.approx(2)

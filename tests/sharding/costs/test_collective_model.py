import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrec_bls.sharding.calibration.fit import CollectiveSamples, fit_collective
from torchrec_bls.sharding.costs.collective_model import (
    AlphaBeta,
    CollectiveModel,
    CollectiveRecord,
    Sigmoid,
    message_bytes,
)
from torchrec_bls.sharding.costs.fitting.accuracy import gmae_percent, mape_percent
from torchrec_bls.sharding.costs.fitting.collectives import (
    choose_curve,
    fit_alpha_beta,
    fit_imbalance,
    fit_sigmoid,
    held_out_uneven_us,
)

from tests.sharding.synthetic import read_back

SIZES = 2.0 ** np.arange(6, 26)
SIGMOID = Sigmoid(
    start_us=80.0,
    us_per_byte=5e-4,
    constant_below_bytes=2.0**12,
    linear_above_bytes=2.0**21,
    centre_log2=15.0,
    steepness=0.8,
)


@given(
    start=st.floats(1, 1e4),
    per_byte=st.floats(1e-6, 1e-2),
    low=st.floats(4, 18),
    width=st.floats(0.5, 14),
    centre=st.floats(0, 1),
    steepness=st.floats(0.06, 4),
)
def test_the_sigmoid_has_no_steps(
    start: float, per_byte: float, low: float, width: float, centre: float, steepness: float
) -> None:
    curve = Sigmoid(start, per_byte, 2**low, 2 ** (low + width), low + centre * width, steepness)
    for boundary in (curve.constant_below_bytes, curve.linear_above_bytes):
        around = boundary * np.asarray([1 - 1e-9, 1.0, 1 + 1e-9])
        times = curve.microseconds(around)
        assert times == pytest.approx(times[1], rel=1e-6)
    assert curve.microseconds(np.asarray([0.0, 2**low / 2])) == pytest.approx(start)
    large = 2 ** (low + width + 3)
    assert curve.microseconds(np.asarray([large])) == pytest.approx(start + large * per_byte)


def test_the_middle_piece_by_hand() -> None:
    """Between the boundaries the logarithm of the bandwidth is a sigmoid, L and b by the ends."""
    m1, m2, m = 2.0**12, 2.0**21, 2.0**16
    s = [1 / (1 + np.exp(-0.8 * (x - 15))) for x in (12, 21, 16)]
    bandwidth = [np.log10(m1 / 80), np.log10(m2 / (80 + m2 * 5e-4))]
    scale = (bandwidth[1] - bandwidth[0]) / (s[1] - s[0])
    expected = m / 10 ** (scale * s[2] + bandwidth[0] - scale * s[0])
    assert SIGMOID.microseconds(np.asarray([m])) == pytest.approx(expected)


def test_alpha_beta_recovers_planted_parameters() -> None:
    noise = np.exp(np.random.default_rng(0).normal(0, 0.05, len(SIZES)))
    curve = fit_alpha_beta(SIZES, (120.0 + 4e-4 * SIZES) * noise)
    assert (curve.start_us, curve.us_per_byte) == pytest.approx((120.0, 4e-4), rel=0.1)


def test_a_fitted_sigmoid_follows_a_planted_one() -> None:
    noise = np.exp(np.random.default_rng(0).normal(0, 0.03, len(SIZES)))
    curve = fit_sigmoid(SIZES, SIGMOID.microseconds(SIZES) * noise)
    between = SIZES * 1.4
    assert mape_percent(curve.microseconds(between), SIGMOID.microseconds(between)) < 6


@pytest.mark.parametrize("truth", [AlphaBeta(120.0, 4e-4), SIGMOID])
def test_the_kept_curve_never_loses_to_alpha_beta(truth: AlphaBeta | Sigmoid) -> None:
    noise = np.exp(np.random.default_rng(1).normal(0, 0.05, len(SIZES)))
    measured = truth.microseconds(SIZES) * noise
    curve, errors = choose_curve(SIZES, measured)
    assert isinstance(curve, Sigmoid) or isinstance(truth, AlphaBeta)
    between = SIZES * 1.4
    of = [
        gmae_percent(c.microseconds(between), truth.microseconds(between))
        for c in (curve, fit_alpha_beta(SIZES, measured))
    ]
    assert of[0] <= of[1] + 1.0
    assert np.abs(errors).mean() < 0.15


def test_a_sigmoid_that_loses_on_drawn_sizes_is_not_kept() -> None:
    between = SIZES * 1.4
    measured = SIGMOID.microseconds(SIZES)
    line = fit_alpha_beta(SIZES, measured)
    kept, _ = choose_curve(SIZES, measured, drawn=(between, SIGMOID.microseconds(between)))
    assert isinstance(kept, Sigmoid)
    kept, errors = choose_curve(SIZES, measured, drawn=(between, line.microseconds(between)))
    assert kept == line
    assert np.abs(errors).max() > 0.01  # of the line, not of the sigmoid, which hits every size
    kept, _ = choose_curve(SIZES, measured, drawn=(between[:0], between[:0]))
    assert isinstance(kept, Sigmoid)


def test_unevenness_by_hand() -> None:
    # The paper's rule: the rank that sends or receives most decides.
    assert message_bytes([10, 20, 30], [25, 5, 30], 1.0) == pytest.approx(30)
    assert message_bytes([10, 20, 15], [0, 0, 45], 1.0) == pytest.approx(45)
    # Shared cores: the bytes of all.
    assert message_bytes([10, 20, 15], [0, 0, 45], 0.0) == 15
    assert message_bytes([10, 20, 15], [0, 0, 45], 0.5) == pytest.approx(np.sqrt(15 * 45))
    assert message_bytes([0, 0], [0, 0], 0.5) == 0


@pytest.mark.parametrize("planted", [0.0, 0.4, 1.0])
def test_the_imbalance_is_recovered(planted: float) -> None:
    random = np.random.default_rng(0)
    mean = 2.0 ** random.uniform(14, 24, 40)
    largest = mean * random.uniform(1, 2, 40)
    measured = SIGMOID.microseconds(mean * (largest / mean) ** planted)
    noisy = measured * np.exp(random.normal(0, 0.03, 40))
    assert fit_imbalance(SIGMOID, mean, largest, noisy) == pytest.approx(planted, abs=0.1)


def test_the_papers_rule_stays_where_another_exponent_gains_nothing() -> None:
    random = np.random.default_rng(1)  # of which 0.4 fits best, by a hair
    mean = 2.0 ** random.uniform(14, 24, 12)
    largest = mean * random.uniform(1, 1.1, 12)
    noisy = SIGMOID.microseconds(largest) * np.exp(random.normal(0, 0.1, 12))
    assert fit_imbalance(SIGMOID, mean, largest, noisy) == 1.0


def test_uneven_messages_are_predicted_without_themselves() -> None:
    mean = np.asarray([2.0**16, 2.0**18, 2.0**20])
    largest = 2 * mean
    # Two of them depend on the mean, the third on the largest: together they don't settle it.
    us = SIGMOID.microseconds(np.where([True, True, False], mean, largest))
    assert fit_imbalance(SIGMOID, mean, largest, us) == 1.0
    # The third is predicted by the first two, which agree, and these by two that don't.
    predicted = held_out_uneven_us(SIGMOID, mean, largest, us)
    expected = SIGMOID.microseconds(np.where([True, True, False], largest, mean))
    assert predicted == pytest.approx(expected)
    assert held_out_uneven_us(SIGMOID, mean[:1], largest[:1], us[:1]) == pytest.approx(
        SIGMOID.microseconds(largest[:1])
    )


def test_a_fitted_collective_has_seen_no_drawn_size() -> None:
    drawn = SIZES[2:-2] * 1.3
    sizes = np.concatenate([SIZES, drawn])
    role = np.asarray(["grid"] * len(SIZES) + ["between"] * len(drawn))
    # Drawn sizes take twice as long as the curve through the others, and no model may know it.
    us = (120.0 + 4e-4 * sizes) * np.where(role == "grid", 1.0, 2.0)
    samples = CollectiveSamples(role, sizes, sizes, us, us[None])
    model = fit_collective(("all_reduce", "gloo", 2), samples)
    assert model.curve.microseconds(drawn) == pytest.approx(us[len(SIZES) :] / 2, rel=1e-3)
    assert model.held_out_gmae_percent == pytest.approx(50, abs=0.1)
    assert model.interval_log[1] == pytest.approx(np.log(2), abs=1e-3)


def test_beyond_the_largest_message_the_interval_widens() -> None:
    model = CollectiveModel(
        "all_to_all",
        "gloo",
        4,
        AlphaBeta(100.0, 1e-3),
        1.0,
        (-0.1, 0.1),
        (-0.3, 0.3),
        (64.0, 2.0**20),
        5.0,
        8.0,
    )
    inside, outside = model.estimate(2.0**20), model.estimate(2.0**22)
    assert inside.high / inside.microseconds == pytest.approx(np.exp(0.1))
    assert outside.high / outside.microseconds == pytest.approx(np.exp(0.3))
    uneven = model.estimate(2.0**20, even=False)
    assert uneven.low / uneven.microseconds == pytest.approx(np.exp(-0.3))


@pytest.mark.parametrize(
    ("cpu_us", "backend", "expected"),
    [
        (40.0 + 2e-4 * SIZES, "gloo", AlphaBeta(40.0, 2e-4)),
        # Ranks of channels spin, and older measurements have no times of cores.
        (40.0 + 2e-4 * SIZES, "bls", None),
        (None, "gloo", None),
    ],
)
def test_work_on_cores_is_fitted_apart(
    cpu_us: np.ndarray | None, backend: str, expected: AlphaBeta | None
) -> None:
    us = 120.0 + 4e-4 * SIZES
    role = np.repeat("grid", len(SIZES))
    samples = CollectiveSamples(role, SIZES, SIZES, us, us[None], cpu_us)
    model = fit_collective(("all_to_all", backend, 2), samples)
    if expected is None:
        assert model.work is None
        assert model.estimate(1e6).on_core == 1.0
    else:
        assert model.work is not None
        assert dataclasses.astuple(model.work) == pytest.approx(dataclasses.astuple(expected))
        assert model.estimate(1e6).on_core == pytest.approx((40 + 200) / (120 + 400), rel=1e-3)


def test_work_of_several_threads_is_no_more_than_all_of_the_time() -> None:
    model = dataclasses.replace(collective(AlphaBeta(10.0, 1e-3)), work=AlphaBeta(5.0, 2e-3))
    assert model.estimate(1e3).on_core == pytest.approx(7 / 11)
    assert model.estimate(1e6).on_core == 1.0


def collective(curve: AlphaBeta | Sigmoid) -> CollectiveModel:
    return CollectiveModel(
        "all_reduce", "gloo", 2, curve, 0.3, (-0.1, 0.2), (-0.3, 0.4), (64.0, 1e6), 5.0, 8.0
    )


@pytest.mark.parametrize("work", [None, AlphaBeta(1.0, 0.0)])
@pytest.mark.parametrize("curve", [AlphaBeta(1.5, 2e-3), SIGMOID])
def test_json_gives_the_same_collective_back(
    curve: AlphaBeta | Sigmoid, work: AlphaBeta | None
) -> None:
    model = dataclasses.replace(collective(curve), work=work)
    assert ("work" in model.as_json()) == (work is not None)
    assert read_back(model.as_json(), CollectiveRecord).model() == model


@pytest.mark.parametrize("work", [{"start_us": -1.0}, {"us_per_byte": float("nan")}])
def test_work_that_cannot_be_is_refused(work: dict[str, float]) -> None:
    record = dataclasses.replace(collective(SIGMOID), work=AlphaBeta(1.0, 1e-3)).as_json()
    record["work"] |= work
    with pytest.raises(ValueError, match=r"no JSON|work.start_us: expected float >= 0"):
        read_back(record, CollectiveRecord)


@pytest.mark.parametrize(
    "change",
    [
        {"start_us": -1.0},
        {"us_per_byte": float("inf")},
        {"centre_log2": 99.0},
        {"linear_above_bytes": 2.0**12},
    ],
)
def test_curves_that_cannot_be_are_refused(change: dict[str, float]) -> None:
    bad = dataclasses.replace(SIGMOID, **change)
    interval = (0.0, 0.0)
    model = CollectiveModel(
        "all_reduce", "bls", 2, bad, 1.0, interval, interval, (64.0, 1e6), 5.0, 8.0
    )
    with pytest.raises(ValueError, match=r"(no JSON|it: curve)"):
        read_back(model.as_json(), CollectiveRecord)

"""Models of dense ops: known coefficients come back."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulator.dense.fit import DenseSamples, dense_samples, fit_dense, held_out_us
from benchmarks.simulator.dense.model import DenseModel, DenseOpModel, Gradient, LayerTimes
from benchmarks.simulator.dense.ops import (
    ATTENTION,
    LAYERS,
    OF_GRADIENTS,
    TERMS,
    DenseOp,
    terms,
)

_CACHES = (2.0**16, 2.0**20)
_KEYS = [(kind, direction) for kind in LAYERS for direction in ("forward", "backward")]
_KEYS += [(kind, "forward") for kind in OF_GRADIENTS]


def _random_ops(kind: str, count: int, seed: int) -> tuple[DenseOp, ...]:
    random = np.random.default_rng(seed)

    def size(low: float, high: float) -> int:
        return int(np.exp(random.uniform(np.log(low), np.log(high))))

    return tuple(
        DenseOp(
            kind,
            # Attention is cubic in what others are square in.
            size(4, 64 if kind in ATTENTION else 8192),
            size(8, 256 if kind in ATTENTION else 2048),
            size(8, 64 if kind in ATTENTION else 2048),
            input_gradient=bool(random.random() < 0.5),
        )
        for _ in range(count)
    )


def _planted(kind: str) -> np.ndarray:
    """Each term of a mean op takes some 10 us, however large it is."""
    columns = terms(kind, "backward", _random_ops(kind, 200, seed=1), _CACHES)
    weight = np.random.default_rng(len(kind)).uniform(5, 20, columns.shape[1])
    return weight / np.maximum(columns.mean(axis=0), 1e-9)


def _measured(kind: str, direction: str, noise: float = 0.0, outliers: int = 0) -> DenseSamples:
    ops = _random_ops(kind, 60, seed=2)
    random = np.random.default_rng(3)
    exact = terms(kind, direction, ops, _CACHES) @ _planted(kind)
    times = exact * np.exp(random.normal(0, noise, len(ops)))
    times[:outliers] *= 5
    return DenseSamples(ops, times)


@pytest.mark.parametrize(("kind", "direction"), _KEYS)
def test_planted_times_come_back(kind: str, direction: str) -> None:
    model = fit_dense({(kind, direction): _measured(kind, direction)}, _CACHES)
    others = _random_ops(kind, 50, seed=4)
    np.testing.assert_allclose(
        model.microseconds(kind, direction, others),
        terms(kind, direction, others, _CACHES) @ _planted(kind),
        rtol=1e-6,
    )
    # Errors below 0.01 % count as that.
    assert model.kinds[kind, direction].held_out_gmae_percent == pytest.approx(0.01)


def test_noise_and_outliers_move_the_fit_little() -> None:
    noisy = _measured("linear", "backward", noise=0.05, outliers=3)
    model = fit_dense({("linear", "backward"): noisy}, _CACHES)
    others = _random_ops("linear", 50, seed=4)
    exact = terms("linear", "backward", others, _CACHES) @ _planted("linear")
    ratios = model.microseconds("linear", "backward", others) / exact
    assert np.abs(np.log(ratios)).mean() < 0.04
    assert 2.0 < model.kinds["linear", "backward"].held_out_gmae_percent < 8.0


def test_what_is_held_out_is_not_fitted_to() -> None:
    samples = _measured("gelu", "forward")
    wrong = DenseSamples(samples.ops, samples.measured_us.copy())
    wrong.measured_us[7] *= 10
    exact = held_out_us("gelu", "forward", samples, _CACHES)[7]
    # Its own time has no part in it, whatever it is.
    assert held_out_us("gelu", "forward", wrong, _CACHES)[7] == pytest.approx(exact)


def test_too_few_ops_are_refused() -> None:
    few = DenseSamples(_random_ops("add", 4, 0), np.ones(4))
    with pytest.raises(ValueError, match="4 measured forwards of add; at least 5"):
        fit_dense({("add", "forward"): few}, _CACHES)


def test_terms_by_hand() -> None:
    linear = DenseOp("linear", rows=3, width=5, inner=7, input_gradient=False)
    assert terms("linear", "forward", [linear], [100.0]).tolist() == [
        # 21 + 35 + 15 numbers are 284 bytes.
        [1.0, 105.0, 0.0, 21.0, 35.0, 15.0, 184.0]
    ]
    needed = DenseOp("linear", rows=3, width=5, inner=7)
    assert terms("linear", "forward", [needed], []).tolist()[0][2] == 0.0
    assert terms("linear", "backward", [needed], []).tolist()[0][2] == 105.0
    attention = DenseOp("attention", rows=2, width=10, inner=4)
    assert terms("attention", "forward", [attention], []).tolist() == [[1.0, 800.0, 200.0, 80.0]]


def _one_each() -> DenseModel:
    """An op takes 1 us and its elements, products or scores nothing; but packing 0.5 a number."""
    kinds = {}
    for kind, direction in _KEYS:
        coefficients = np.zeros(len(TERMS[kind]) + 1)
        coefficients[0] = 1.0 if direction == "forward" else 2.0
        coefficients[1] = 0.5 * (kind == "pack")
        kinds[kind, direction] = DenseOpModel(coefficients, 3.0)
    return DenseModel((1e6,), kinds)


def test_times_of_layers_by_hand() -> None:
    ops = [
        DenseOp("dropout", 8, 4, input_gradient=False),
        DenseOp("linear", 8, 2, 4, input_gradient=False, gradient_bytes=(32, 8)),
        DenseOp("relu", 8, 2),
    ]
    assert _one_each().layer_times(ops) == [
        LayerTimes(1.0, 0.0),  # nobody wants its input's gradient
        LayerTimes(1.0, 2.0, (Gradient(32, 1 + 4.0, 1.0, 1.0), Gradient(8, 1 + 1.0, 1.0, 1.0))),
        LayerTimes(1.0, 2.0),
    ]


def test_kinds_that_were_not_measured_are_named() -> None:
    model = DenseModel((), {})
    with pytest.raises(ValueError, match="no forward of dense ops of kind 'relu' was measured"):
        model.layer_times([DenseOp("relu", 1, 1)])
    with pytest.raises(ValueError, match="kind 'tanh'; known are"):
        DenseOp("tanh", 1, 1)
    with pytest.raises(ValueError, match="have to be positive"):
        DenseOp("relu", 0, 1)


def test_repeats_of_several_visits_are_one_sample() -> None:
    op = DenseOp("relu", 2, 3)
    samples = dense_samples([op], [{"forward_us": [1.0, 9.0, 3.0], "backward_us": [2.0, 4.0, 2.0]}])
    assert samples["relu", "forward"].measured_us.tolist() == [3.0]
    assert samples["relu", "backward"].measured_us.tolist() == [2.0]
    assert samples["relu", "forward"].ops == (op,)

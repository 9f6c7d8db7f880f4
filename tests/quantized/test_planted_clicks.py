"""The planted clicks: what is said of their probabilities holds for their labels."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.quantized.planted_clicks import CLICK_RATE, PlantedClicks, bayes_loss
from torchrec_bls.datasets import capped_cardinalities

ROWS = capped_cardinalities(1000)
SAMPLES = 1 << 16


@pytest.fixture(scope="module")
def model() -> PlantedClicks:
    return PlantedClicks(ROWS, seed=3)


def test_labels_are_drawn_with_the_probabilities(model: PlantedClicks) -> None:
    clicks = model.draw(SAMPLES, seed=5)
    assert clicks.probability is not None
    assert abs(clicks.labels.mean() - CLICK_RATE) < 0.02
    order = np.argsort(clicks.probability)
    for part in np.array_split(order, 20):
        expected = clicks.probability[part]
        error = np.sqrt((expected * (1 - expected)).sum()) / len(part)
        assert abs(clicks.labels[part].mean() - expected.mean()) < 4.5 * error


def test_no_model_is_below_the_bayes_loss(model: PlantedClicks) -> None:
    clicks = model.draw(SAMPLES, seed=6)
    assert clicks.probability is not None
    known = clicks.probability.astype(np.float64)

    def losses(predicted: np.ndarray) -> np.ndarray:
        return -np.where(clicks.labels == 1, np.log(predicted), np.log1p(-predicted))

    of_known = losses(known)
    error = of_known.std() / np.sqrt(SAMPLES)
    assert abs(of_known.mean() - bayes_loss(clicks.probability)) < 4 * error
    for worse in (np.full(SAMPLES, known.mean()), known**1.2, 0.9 * known + 0.05):
        paired = losses(worse) - of_known
        assert paired.mean() > 4 * paired.std() / np.sqrt(SAMPLES)


def test_logits_are_the_sum_of_their_parts(model: PlantedClicks) -> None:
    clicks = model.draw(64, seed=7)
    assert clicks.probability is not None
    rows = clicks.ids + model._first_rows
    for sample in range(64):
        factors = model._factors[rows[sample]].astype(np.float64)
        parts = [
            float(model._weights.astype(np.float64) @ clicks.dense[sample]),
            float(model._effects[rows[sample]].astype(np.float64).sum()),
            sum(float(one @ other) for one, other in itertools.combinations(factors, 2)),
        ]
        logit = model._intercept + sum(
            (part - mean) * scale
            for part, mean, scale in zip(parts, model._means, model._scales, strict=True)
        )
        assert 1 / (1 + np.exp(-logit)) == pytest.approx(clicks.probability[sample], rel=1e-3)


def test_samples_are_of_the_shape_and_the_seed(model: PlantedClicks) -> None:
    clicks = model.draw(2000, seed=8)
    assert clicks.dense.shape == (2000, 13) and clicks.dense.min() >= 0
    assert (clicks.ids >= 0).all() and (clicks.ids < np.array(ROWS)).all()
    # Zipf: the most frequent id of the largest tables has a share of its own.
    assert np.bincount(clicks.ids[:, 2]).max() > 100
    same, other = PlantedClicks(ROWS, seed=3).draw(2000, seed=8), model.draw(2000, seed=9)
    assert same.labels.tobytes() == clicks.labels.tobytes()
    assert same.ids.tobytes() == clicks.ids.tobytes()
    assert other.ids.tobytes() != clicks.ids.tobytes()


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="seed is -1"):
        PlantedClicks(ROWS, seed=-1)
    with pytest.raises(ValueError, match="26 tables"):
        PlantedClicks([5, 5], seed=0)

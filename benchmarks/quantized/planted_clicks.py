"""Clicks in Criteo's shape whose probabilities are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_bls.datasets.criteo_shape import (
    CATEGORICAL_FEATURES,
    DENSE_FEATURES,
    check_rows_per_table,
)
from torchrec_bls.datasets.synthetic import zipf_ids

#: Share of clicks in the training rows of Criteo's challenge.
CLICK_RATE = 0.256

# Standard deviations of the logit's parts: dense, effects, pairs. With them a model that knows the
# probabilities is right in 80 % of the cases, a little more than DLRM reaches on Criteo's rows.
# Some ten thousand samples are enough to learn what dense features tell.
_SCALES = (1.3, 0.7, 0.3)
_FACTORS = 4
_CALIBRATION_ROWS = 1 << 15

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Clicks:
    """n samples.

    Attributes:
        dense: (n, 13) float32, dense features.
        ids: (n, 26) int64, one id of each table.
        labels: (n,) float32, labels of 0 or 1.
        probability: (n,) float32, probability of a click; None where nobody knows it.
    """

    dense: Floats
    ids: npt.NDArray[np.int64]
    labels: Floats
    probability: Floats | None = None

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self.labels)

    def rows(self, begin: int, end: int) -> Clicks:
        """Returns the samples [begin, end), which share memory."""
        probability = None if self.probability is None else self.probability[begin:end]
        return Clicks(
            self.dense[begin:end], self.ids[begin:end], self.labels[begin:end], probability
        )


class PlantedClicks:
    """A model of clicks, from which samples are drawn.

    The logit of a click is a sum: an intercept, a weight for each dense feature, an effect of each
    id, and the products of all pairs of ids' hidden factors (a factorization machine). A DLRM's dot
    products can learn the products. Ids follow the bounded Zipf law of `SyntheticDataset`. Dense
    features are logarithms of counts. Labels are drawn: even a model that knows the probabilities
    has the loss `bayes_loss`.

    Args:
        rows_per_table: rows of the 26 tables.
        seed: seed of the model, not negative; the samples have seeds of their own.

    Raises:
        ValueError: an argument is bad.
    """

    def __init__(self, rows_per_table: Sequence[int], *, seed: int) -> None:
        check_rows_per_table(list(rows_per_table))
        if seed < 0:
            raise ValueError(f"seed is {seed}; at least 0 is needed")
        random = np.random.default_rng([seed, 0])
        self._rows_per_table = np.asarray(rows_per_table, dtype=np.int64)
        self._first_rows = np.cumsum(self._rows_per_table) - self._rows_per_table
        rows = int(self._rows_per_table.sum())
        self._weights = random.standard_normal(DENSE_FEATURES, dtype=np.float32)
        self._effects = random.standard_normal(rows, dtype=np.float32)
        self._factors = random.standard_normal((rows, _FACTORS), dtype=np.float32)
        self._scales = np.ones(3, dtype=np.float32)
        self._means = np.zeros(3, dtype=np.float32)
        self._intercept = np.float32(0)
        self._calibrate(np.random.default_rng([seed, 1]))

    def draw(self, rows: int, *, seed: int) -> Clicks:
        """Returns samples; the same model, `rows` and `seed` give the same samples."""
        random = np.random.default_rng([seed, 2])
        dense, ids = self._draw_features(rows, random)
        probability = _sigmoid(self._logits(dense, ids))
        labels = (random.random(rows, dtype=np.float32) < probability).astype(np.float32)
        return Clicks(dense, ids, labels, probability)

    def _calibrate(self, random: np.random.Generator) -> None:
        parts = self._parts(*self._draw_features(_CALIBRATION_ROWS, random))
        self._means = parts.mean(axis=0)
        self._scales = np.array(_SCALES, dtype=np.float32) / parts.std(axis=0)
        logits = ((parts - self._means) * self._scales).sum(axis=1)
        low, high = -20.0, 20.0
        for _ in range(40):
            middle = (low + high) / 2
            if _sigmoid(logits + np.float32(middle)).mean() < CLICK_RATE:
                low = middle
            else:
                high = middle
        self._intercept = np.float32(low)

    def _draw_features(
        self, rows: int, random: np.random.Generator
    ) -> tuple[Floats, npt.NDArray[np.int64]]:
        counts = np.exp(1.5 * random.standard_normal((rows, DENSE_FEATURES), dtype=np.float32))
        uniform = random.random(rows * CATEGORICAL_FEATURES)
        ids = zipf_ids(uniform, np.tile(self._rows_per_table, rows))
        return np.log1p(np.floor(counts)), ids.reshape(rows, CATEGORICAL_FEATURES)

    def _logits(self, dense: Floats, ids: npt.NDArray[np.int64]) -> Floats:
        parts = (self._parts(dense, ids) - self._means) * self._scales
        logits: Floats = parts.sum(axis=1) + self._intercept
        return logits

    def _parts(self, dense: Floats, ids: npt.NDArray[np.int64]) -> Floats:
        """Returns the unscaled parts of the logits, (n, 3)."""
        rows = ids + self._first_rows
        factors = self._factors[rows]
        of_all = np.square(factors.sum(axis=1)).sum(axis=1)
        of_each = np.square(factors).sum(axis=(1, 2))
        pairs = (of_all - of_each) / 2
        return np.stack([dense @ self._weights, self._effects[rows].sum(axis=1), pairs], axis=1)


def bayes_loss(probability: Floats) -> float:
    """Returns the mean cross entropy of a model that knows the probabilities: the mean entropy of
    the labels, in nats. No model can be below it."""
    exact = probability.astype(np.float64)
    return float(-(exact * np.log(exact) + (1 - exact) * np.log1p(-exact)).mean())


def _sigmoid(logits: Floats) -> Floats:
    # Even the label of a large logit stays uncertain, so that entropies are finite.
    return (1 / (1 + np.exp(-np.clip(logits, -15, 15)))).astype(np.float32)

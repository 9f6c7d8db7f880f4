"""How long a batch will take."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

# Batches whose times correct the prediction, and the share of them that it has to cover.
_REMEMBERED, _COVERED = 128, 0.9
# Batches after which the correction is computed anew.
_STRIDE = 8
# Seconds that any batch takes at least, so that none takes no time.
_SHORTEST = 1e-6


class Costs(NamedTuple):
    """Seconds that a batch takes, corrected by those before.

    Attributes:
        batch: of a batch of any size.
        sample: of each sample.
        id: of each id.
    """

    batch: float
    sample: float
    id: float


class Predictor:
    """Predicts the time of a batch from its samples and ids.

    The time is affine in both. It is fitted to batches of the warm-up. Later batches correct it: by
    a quantile of the last ones' actual times over their predicted ones.

    Args:
        measured: samples, ids and seconds of batches; several of different sizes.

    Attributes:
        costs: see Costs.
        correction: factor in them.
    """

    def __init__(self, measured: Sequence[tuple[int, int, float]]) -> None:
        facts = np.array([(1.0, samples, ids) for samples, ids, _ in measured])
        seconds = np.array([max(each, _SHORTEST) for _, _, each in measured])
        # Relative errors count alike, of short batches and long ones.
        fitted, _ = nnls(facts / seconds[:, None], np.ones(len(seconds)))
        self._fitted = Costs(*fitted.tolist())
        self._ratios: deque[float] = deque(maxlen=_REMEMBERED)
        self.forget()

    def forget(self) -> None:
        """Forgets all corrections: what was fitted counts again."""
        self._ratios.clear()
        self._since = 0
        self.correct_by(1.0)

    def correct_by(self, factor: float) -> None:
        """Multiplies all that was fitted by a factor."""
        self.correction = factor
        self.costs = Costs(*(factor * each for each in self._fitted))

    def seconds(self, samples: int, ids: int) -> float:
        """Returns the predicted seconds of a batch."""
        return self.costs.batch + samples * self.costs.sample + ids * self.costs.id

    def observe(self, samples: int, ids: int, seconds: float) -> None:
        """Takes the time of a batch into account.

        Args:
            samples: its samples.
            ids: its ids.
            seconds: how long it took; with all that the process did until the next one, if
                requests were waiting for that.
        """
        fitted = self._fitted
        expected = fitted.batch + samples * fitted.sample + ids * fitted.id
        self._ratios.append(seconds / max(expected, _SHORTEST))
        self._since += 1
        if self._since >= _STRIDE:
            self._since = 0
            self.correct_by(float(np.quantile(self._ratios, _COVERED)))

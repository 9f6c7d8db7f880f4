"""How long a batch will take."""

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

# Batches that corrections come from, and how many there are from one to the next.
_BATCHES, _BATCHES_BETWEEN = 256, 16
# Requests that the margin comes from, how many there are from one to the next, and the share of
# them that it covers.
_REQUESTS, _REQUESTS_BETWEEN, _COVERED = 1024, 32, 0.998
# Seconds after which the end of a request counts no more. Else a moment in which the machine stood
# still would count for long where it makes few requests be admitted.
_OUT_OF_DATE = 1.0
# Seconds that any batch takes at least, so that none takes no time.
_SHORTEST = 1e-6


class Costs(NamedTuple):
    """Seconds that a batch takes.

    Attributes:
        batch: of a batch of any size.
        sample: of each sample.
        id: of each id.
    """

    batch: float
    sample: float
    id: float


class _Batch(NamedTuple):
    fitted_s: float
    model_s: float
    turn_s: float


class Predictor:
    """Predicts the time of batches from their samples and ids.

    The time of the model is affine in both, as fitted to batches of the warm-up, and slower by what
    the last batches took, their median. From one batch to the next it takes longer: answers are
    written and requests are read. How much later requests end than all of this predicts, as good
    as all of them, is the margin that the next ones need.

    Args:
        measured: samples, ids and seconds of batches; several of different sizes.

    Attributes:
        costs: what the model takes, see Costs.
        slowdown: factor of that over the warm-up.
        stretch: factor of the time from one batch to the next over that of the model.
        margin_s: seconds after their predicted end by which as good as all requests end.
    """

    def __init__(self, measured: Sequence[tuple[int, int, float]]) -> None:
        facts = np.array([(1.0, samples, ids) for samples, ids, _ in measured])
        seconds = np.array([max(each, _SHORTEST) for _, _, each in measured])
        # Relative errors count alike, of short batches and long ones.
        fitted, _ = nnls(facts / seconds[:, None], np.ones(len(seconds)))
        self._fitted = Costs(*fitted.tolist())
        self._batches: deque[_Batch] = deque(maxlen=_BATCHES)
        # Moments of ends, and their delays.
        self._ends: deque[tuple[float, float]] = deque(maxlen=_REQUESTS)
        self.forget()

    def forget(self) -> None:
        """Forgets all corrections: what was fitted counts again."""
        self._batches.clear()
        self._ends.clear()
        self._new_batches = self._new_ends = 0
        self.costs = self._fitted
        self.slowdown = self.stretch = 1.0
        self.margin_s = 0.0

    def seconds(self, samples: int, ids: int) -> float:
        """Returns the predicted seconds of the model for a batch."""
        return _seconds(self.costs, samples, ids)

    def observe(self, samples: int, ids: int, model_s: float, turn_s: float) -> None:
        """Takes a batch into account.

        Args:
            samples: its samples.
            ids: its ids.
            model_s: seconds from its begin to its last score.
            turn_s: seconds until the next batch could begin.
        """
        fitted_s = max(_seconds(self._fitted, samples, ids), _SHORTEST)
        self._batches.append(_Batch(fitted_s, model_s, turn_s))
        self._new_batches += 1
        if self._new_batches >= _BATCHES_BETWEEN:
            self._correct()

    def observe_end(self, delay_s: float) -> None:
        """Takes the end of a request into account.

        Args:
            delay_s: seconds after its predicted end.
        """
        now = time.monotonic()
        self._ends.append((now, delay_s))
        self._new_ends += 1
        if self._new_ends >= _REQUESTS_BETWEEN:
            self._new_ends = 0
            while self._ends[0][0] < now - _OUT_OF_DATE:
                self._ends.popleft()
            delays = np.array([each for _, each in self._ends])
            place = int(_COVERED * len(delays))
            self.margin_s = max(0.0, float(np.partition(delays, place)[place]))

    def _correct(self) -> None:
        self._new_batches = 0
        fitted_s, model_s, turn_s = np.array(self._batches).T
        self.slowdown = float(np.median(model_s / fitted_s))
        self.costs = Costs(*(self.slowdown * each for each in self._fitted))
        expected_s = max(float(self.slowdown * fitted_s.sum()), _SHORTEST)
        self.stretch = float(turn_s.sum()) / expected_s


def _seconds(costs: Costs, samples: int, ids: int) -> float:
    return costs.batch + samples * costs.sample + ids * costs.id

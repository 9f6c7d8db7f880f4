"""How long a batch will take."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

# Batches that corrections come from, and how many there are from one to the next.
_BATCHES, _BATCHES_BETWEEN = 256, 16
# Requests that the margin comes from, how many there are from one to the next, and the share of
# those admitted that may be late.
_REQUESTS, _REQUESTS_BETWEEN, _LATE = 1024, 32, 0.002
# Seconds after which a request counts no more. Else a moment in which the machine stood still would
# count for long where it makes few requests be admitted.
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


class _Last:
    """The last numbers of a kind. Each request adds some, which costs it a fraction of a
    microsecond; numpy reads them where they lie.

    Args:
        count: how many are kept.
        columns: numbers of one.
    """

    def __init__(self, count: int, columns: int) -> None:
        self._numbers = np.zeros((columns, count))
        # A number is written faster than through numpy.
        self._cells: Any = self._numbers.data
        self._count = count
        self.clear()

    def clear(self) -> None:
        """Forgets all."""
        self.added = 0

    def add(self, *numbers: float) -> None:
        """Adds one, in place of the oldest."""
        place = self.added % self._count
        for column, number in enumerate(numbers):
            self._cells[column, place] = number
        self.added += 1

    def columns(self) -> NDArray[np.float64]:
        """Returns them, [columns, kept ones], in no order. The next one changes it."""
        return self._numbers[:, : min(self.added, self._count)]

    def since(self, moment: float) -> NDArray[np.float64]:
        """Returns the second column of those whose first one is a moment or later."""
        moments, numbers = self.columns()
        recent: NDArray[np.float64] = numbers[moments >= moment]
        return recent


class Predictor:
    """Predicts the time of batches from their samples and ids.

    The time of the model is affine in both, as fitted to batches of the warm-up, and slower by what
    the last batches took, their median. From one batch to the next it takes longer: answers are
    written and requests are read. Requests end earlier or later than all of this predicts. The
    margin is the time that has to be left for it to those who are admitted, so that as few of them
    are late as may be: the less, the fewer come with little time left.

    Args:
        measured: samples, ids and seconds of batches; several of different sizes.

    Attributes:
        costs: what the model takes, see Costs.
        slowdown: factor of that over the warm-up.
        stretch: factor of the time from one batch to the next over that of the model.
        margin_s: seconds that have to be left from the predicted end of a request to its deadline,
            so that few of all that are admitted are late.
        safe_margin_s: the same, so that whoever is admitted is rarely late.
    """

    def __init__(self, measured: Sequence[tuple[int, int, float]]) -> None:
        facts = np.array([(1.0, samples, ids) for samples, ids, _ in measured])
        seconds = np.array([max(each, _SHORTEST) for _, _, each in measured])
        # Relative errors count alike, of short batches and long ones.
        fitted, _ = nnls(facts / seconds[:, None], np.ones(len(seconds)))
        self._fitted = Costs(*fitted.tolist())
        # What was fitted to each, what the model took, and the time until the next one.
        self._batches = _Last(_BATCHES, 3)
        # Moments of ends, and their delays; moments of arrivals, and the time that they had left.
        self._ends, self._slacks = _Last(_REQUESTS, 2), _Last(_REQUESTS, 2)
        self.forget()

    def forget(self) -> None:
        """Forgets all corrections: what was fitted counts again."""
        self._batches.clear()
        self._ends.clear()
        self._slacks.clear()
        self.costs = self._fitted
        self.slowdown = self.stretch = 1.0
        self.margin_s = self.safe_margin_s = 0.0

    def seconds(self, samples: int, ids: int) -> float:
        """Returns the predicted seconds of the model for a batch."""
        return _seconds(self.costs, samples, ids)

    def more_s(self, samples: int, ids: int) -> float:
        """Returns the predicted seconds by which a batch takes longer with so many more, until the
        next one."""
        return self.stretch * (samples * self.costs.sample + ids * self.costs.id)

    def observe(self, samples: int, ids: int, model_s: float, turn_s: float) -> None:
        """Takes a batch into account.

        Args:
            samples: its samples.
            ids: its ids.
            model_s: seconds from its begin to its last score.
            turn_s: seconds until the next batch could begin.
        """
        fitted_s = max(_seconds(self._fitted, samples, ids), _SHORTEST)
        self._batches.add(fitted_s, model_s, turn_s)
        if self._batches.added % _BATCHES_BETWEEN == 0:
            self._correct()

    def observe_slack(self, slack_s: float) -> None:
        """Takes a request into account that may be admitted or refused.

        Args:
            slack_s: seconds from its predicted end to its deadline.
        """
        self._slacks.add(time.monotonic(), slack_s)

    def observe_end(self, delay_s: float) -> None:
        """Takes the end of a request into account.

        Args:
            delay_s: seconds after its predicted end.
        """
        now = time.monotonic()
        self._ends.add(now, delay_s)
        if self._ends.added % _REQUESTS_BETWEEN == 0:
            since = now - _OUT_OF_DATE
            self.safe_margin_s, self.margin_s = _margins(
                self._ends.since(since), self._slacks.since(since)
            )

    def _correct(self) -> None:
        fitted_s, model_s, turn_s = self._batches.columns()
        self.slowdown = float(np.median(model_s / fitted_s))
        self.costs = Costs(*(self.slowdown * each for each in self._fitted))
        expected_s = max(float(self.slowdown * fitted_s.sum()), _SHORTEST)
        self.stretch = float(turn_s.sum()) / expected_s


def _seconds(costs: Costs, samples: int, ids: int) -> float:
    return costs.batch + samples * costs.sample + ids * costs.id


def _margins(delays: NDArray[np.float64], slacks: NDArray[np.float64]) -> tuple[float, float]:
    """Returns the least times that have to be left to those who are admitted: so that each of them
    is late as rarely as may be, and so that all of them are.

    Args:
        delays: seconds from the predicted to the real end of requests, [ends], at least one.
        slacks: seconds from the predicted end to the deadline of requests, [requests].
    """
    delays = np.sort(delays)
    safe = max(0.0, float(delays[int((1 - _LATE) * len(delays))]))
    # Whoever has more time left is late less often: those from the most to any number of seconds.
    slacks = np.sort(slacks)[::-1]
    late = 1 - np.searchsorted(delays, slacks, side="right") / len(delays)
    admitted = np.searchsorted(np.cumsum(late) / np.arange(1, len(slacks) + 1), _LATE, side="right")
    least = max(0.0, float(slacks[admitted])) if admitted < len(slacks) else 0.0
    return safe, least

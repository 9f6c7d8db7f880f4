"""Who waited for whom in the traces of a job."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_bls.observe.slowest import Slowest, in_order, slowest_of
from torchrec_bls.observe.traces.recorded_job import RecordedJob

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Lateness:
    """Waits of all ranks.

    Attributes:
        waited_us: (ranks, ranks), microseconds a step that [rank] waited for [other], which was the
            last to send.
        waited_least: the rank that waited least, or None if none waited.
    """

    waited_us: Floats
    waited_least: Slowest | None

    @property
    def slowest(self) -> int | None:
        """Returns the rank that holds the others up, or None if no rank stands out."""
        least = self.waited_least
        return least.rank if least is not None and least.stands_out else None


def lateness_of(job: RecordedJob) -> Lateness:
    """Returns who waited for whom."""
    ranks, steps = len(job.traces), job.recording.steps
    waited = np.zeros((ranks, ranks))
    by_step = np.zeros((ranks, steps))
    for wait in job.waits:
        last = int(np.nanargmax(wait.sent))
        # Only until the last one had sent: the rest is reading.
        waited_us = max(0.0, min(wait.end, wait.sent[last]) - wait.begin)
        waited[wait.rank, last] += waited_us
        by_step[wait.rank, wait.step] += waited_us
    least = slowest_of(
        by_step.mean(axis=1).tolist(),
        job.step_us,
        chance=min(1.0, _chance_us(by_step) / job.step_us),
    )
    return Lateness(waited / steps, least)


def _chance_us(by_step: Floats) -> float:
    """Returns two standard errors of the mean difference between the two ranks that waited
    least, by what they waited in each step."""
    ranks, steps = by_step.shape
    if ranks == 1 or steps == 1:
        return math.inf  # nothing to compare
    slowest, next_to_it = in_order(by_step.mean(axis=1).tolist())[:2]
    differences = by_step[next_to_it] - by_step[slowest]
    return float(2 * differences.std(ddof=1) / math.sqrt(steps))

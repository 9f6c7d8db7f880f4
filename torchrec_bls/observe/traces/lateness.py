"""Who waited for whom in the traces of a job."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_bls.observe.traces.recorded_job import RecordedJob

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Lateness:
    """Waits of all ranks.

    Attributes:
        waited_us: (ranks, ranks), microseconds a step that [rank] waited for [other], which was the
            last to send.
    """

    waited_us: Floats

    @property
    def last(self) -> int:
        """Returns the rank that others waited for most."""
        return int(self.waited_us.sum(axis=0).argmax())


def lateness_of(job: RecordedJob) -> Lateness:
    """Returns who waited for whom."""
    ranks = len(job.traces)
    waited = np.zeros((ranks, ranks))
    for wait in job.waits:
        last = int(np.nanargmax(wait.sent))
        # Only until the last one had sent: the rest is reading.
        waited[wait.rank, last] += max(0.0, min(wait.end, wait.sent[last]) - wait.begin)
    return Lateness(waited / job.recording.steps)

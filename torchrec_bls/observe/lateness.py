"""Who waited for whom in joined traces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_bls.observe.traces import JoinedTraces

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Lateness:
    """Waits of all ranks.

    Attributes:
        waited_us: (ranks, ranks), microseconds a step that [rank] waited for [other], which was the
            last to send.
        step_us: from one step to the next, the mean.
    """

    waited_us: Floats
    step_us: float

    @property
    def last(self) -> int:
        """The rank that others waited for most."""
        return int(self.waited_us.sum(axis=0).argmax())


def lateness_of(joined: JoinedTraces) -> Lateness:
    """Returns who waited for whom."""
    ranks = len(joined.traces)
    steps = joined.start.shape[2]
    waited = np.zeros((ranks, ranks))
    posts = {channel: i for i, (channel, action) in enumerate(joined.calls) if action == "post"}
    for i, (channel, action) in enumerate(joined.calls):
        if action != "wait":
            continue
        sent = joined.end[posts[channel]]
        last = sent.argmax(axis=0)
        for rank in range(ranks):
            # Only until the last one had sent: what follows is reading.
            until = np.minimum(joined.end[i, rank], sent.max(axis=0))
            times = np.maximum(until - joined.start[i, rank], 0.0)
            np.add.at(waited[rank], last, times)
    first = joined.start[0]
    step = float((first[:, -1] - first[:, 0]).mean() / (steps - 1))
    return Lateness(waited / steps, step)

"""How many requests have ended, how, and how fast: of one worker, and of several."""

import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from torchrec_bls.serve.outcomes import Outcome

# Requests that are remembered, and seconds whose rate is told.
_REMEMBERED, _RECENT = 2048, 10.0
_BY_LABEL = {each.label: each for each in Outcome}


class Ended(NamedTuple):
    """A request that has ended.

    Attributes:
        moment: when, in seconds of `time.monotonic()`, which all processes of a host share.
        outcome: how.
        seconds: since its arrival.
    """

    moment: float
    outcome: Outcome
    seconds: float


class Tally:
    """Counts of requests that have ended.

    Attributes:
        began: since when they are counted, in seconds of `time.monotonic()`.
        counts: how many have ended so, by outcome.
        last: the last ones, the newest last.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.counts = dict.fromkeys(Outcome, 0)
        self.last: deque[Ended] = deque(maxlen=_REMEMBERED)

    def add(self, ended: Ended) -> None:
        """Counts a request that has ended."""
        self.counts[ended.outcome] += 1
        self.last.append(ended)

    def rate(self) -> float:
        """Returns how many requests have ended in a second, over the last ten seconds, or over the
        last requests if these are all of fewer seconds."""
        now = time.monotonic()
        began = max(self.began, now - _RECENT)
        if len(self.last) == _REMEMBERED:
            began = max(began, self.last[0].moment)
        ended = sum(each.moment >= began for each in self.last)
        return ended / max(now - began, 1e-3)

    def told(self) -> "ToldTally":
        """Returns what another process is told of it."""
        return ToldTally(
            self.began,
            {outcome.label: count for outcome, count in self.counts.items()},
            [(each.moment, each.outcome.label, each.seconds) for each in self.last],
        )


class ToldTally(msgspec.Struct):
    """A tally as JSON has it: outcomes are labels.

    Attributes:
        began: see `Tally`.
        counts: see `Tally`.
        last: see `Tally`.
    """

    began: float
    counts: dict[str, int]
    last: list[tuple[float, str, float]]


def together(tallies: Iterable[ToldTally]) -> Tally:
    """Returns the tally of several workers."""
    all_of_them = Tally()
    last: list[Ended] = []
    for each in tallies:
        all_of_them.began = min(all_of_them.began, each.began)
        for label, count in each.counts.items():
            all_of_them.counts[_BY_LABEL[label]] += count
        last += (Ended(moment, _BY_LABEL[label], s) for moment, label, s in each.last)
    all_of_them.last.extend(sorted(last, key=lambda each: each.moment))
    return all_of_them

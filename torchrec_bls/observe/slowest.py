"""Whether a rank holds the others up, by how long each rank waited (docs/design/straggler.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_GAIN = 0.05


@dataclass(frozen=True)
class Slowest:
    """The rank that waited least, and so did the most work.

    Attributes:
        rank: number of the rank.
        gain: part of the run's time that would be saved if it were as fast as the next slowest.
        needed: gain from which on the rank stands out: 5 % of the run, and no less than chance may
            make.
    """

    rank: int
    gain: float
    needed: float

    @property
    def stands_out(self) -> bool:
        """Returns whether the rank holds the others up, as far as the run can tell."""
        return self.gain >= self.needed

    def __str__(self) -> str:
        """Returns the verdict in a sentence."""
        if self.stands_out:
            return (
                f"rank {self.rank} holds the others up: it waited least, and were it as fast as "
                f"the next, steps would be {self.gain:.0%} shorter"
            )
        return (
            f"no rank stands out: were rank {self.rank}, which waited least, as fast as the next, "
            f"steps would be {self.gain:.0%} shorter, which counts from {self.needed:.0%} on"
        )


def slowest_of(waited: Sequence[float], time: float, chance: float) -> Slowest | None:
    """Returns the rank that waited least, or None if no rank waited for another.

    Args:
        waited: time that each rank waited for any other one.
        time: time of the run, in the same unit.
        chance: part of the run that ranks alike may differ by, which is no gain.
    """
    if len(waited) < 2 or not any(waited):
        return None
    slowest, next_to_it = in_order(waited)[:2]
    gain = (waited[next_to_it] - waited[slowest]) / time
    return Slowest(slowest, gain, needed=max(_LEAST_GAIN, chance))


def in_order(waited: Sequence[float]) -> list[int]:
    """Returns the ranks, that which waited least first."""
    return sorted(range(len(waited)), key=lambda rank: waited[rank])


def chance_in(steps: int) -> float:
    """Returns the part of a run that two ranks alike may differ by, where only its length is known.

    It is two standard deviations of the difference, 2 sqrt(2) c / sqrt(steps), if a rank's step
    varies by c = 0.7 of its length.
    """
    return 2.0 / math.sqrt(max(1, steps))

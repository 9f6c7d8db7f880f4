"""What a recorded job did: for each rank and step, work, exchanges that begin, and waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Exchange(NamedTuple):
    """A collective, or the messages of a channel, of a step.

    Attributes:
        group: process group or channel, whose ranks all take part.
        number: within the group and the step.
        name: that people know it by.
    """

    group: str
    number: int
    name: str


@dataclass(frozen=True)
class Work:
    """Of the main thread, or of autograd's while the main thread waits for it.

    Attributes:
        us: microseconds.
    """

    us: float


@dataclass(frozen=True)
class Begin:
    """The main thread begins an exchange, and goes on.

    Attributes:
        exchange: which.
        took_us: of this rank, from when all ranks have begun: on the worker, or on the main thread
            once it waits.
        worker: thread that takes part in it and does nothing else meanwhile; None where the
            main thread reads messages itself.
        latency_us: until the worker begins.
    """

    exchange: Exchange
    took_us: float
    worker: int | None = None
    latency_us: float = 0.0


@dataclass(frozen=True)
class Wait:
    """The main thread goes on when an exchange is done.

    Attributes:
        exchange: which.
        back: steps ago that it was begun.
    """

    exchange: Exchange
    back: int = 0


Op = Work | Begin | Wait
Steps = Sequence[Sequence[Op]]


@dataclass(frozen=True)
class Recording:
    """All ranks of a job.

    Attributes:
        ranks: steps of each rank, of which all have as many.
        members: ranks of each group.
        trains: whether there was a backward.
        bound: iterations that the ranks could be apart.
    """

    ranks: Sequence[Steps]
    members: Mapping[str, Sequence[int]]
    trains: bool = False
    bound: int = 0

    @property
    def steps(self) -> int:
        """Of each rank."""
        return len(self.ranks[0])

    @property
    def has_workers(self) -> bool:
        """Whether workers make exchanges, as those of a process group do."""
        return any(
            isinstance(op, Begin) and op.worker is not None
            for steps in self.ranks
            for step in steps
            for op in step
        )

    @property
    def begins_early(self) -> bool:
        """Whether a step waits for what an earlier one began."""
        return any(
            isinstance(op, Wait) and op.back > 0
            for steps in self.ranks
            for step in steps
            for op in step
        )

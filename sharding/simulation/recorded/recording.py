"""A recorded job: for each rank and step, its work, begins of exchanges, and waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Exchange(NamedTuple):
    """A collective, or the messages of a channel, of a step.

    Attributes:
        group: process group or channel, whose ranks all take part.
        number: number within the group and the step.
        name: name for people.
    """

    group: str
    number: int
    name: str


@dataclass(frozen=True)
class Work:
    """Work of the main thread, or of autograd's thread while the main thread waits for it.

    Attributes:
        us: microseconds.
    """

    us: float


@dataclass(frozen=True)
class Begin:
    """The main thread begins an exchange, and goes on.

    Attributes:
        exchange: exchange that begins.
        took_us: time that this rank takes from when all ranks have begun. It is time of the worker,
            or of the main thread once it waits.
        worker: thread that takes part in the exchange and does nothing else meanwhile; None where
            the main thread reads messages itself.
        latency_us: time until the worker begins.
        sent_bytes: this rank's bytes for all ranks, itself included; None: they were not recorded.
    """

    exchange: Exchange
    took_us: float
    worker: int | None = None
    latency_us: float = 0.0
    sent_bytes: float | None = None


@dataclass(frozen=True)
class Wait:
    """The main thread goes on when an exchange is done.

    Attributes:
        exchange: exchange that the thread waits for.
        back: number of steps since the exchange began.
    """

    exchange: Exchange
    back: int = 0


Op = Work | Begin | Wait
Steps = Sequence[Sequence[Op]]


@dataclass(frozen=True)
class Recording:
    """All ranks of a job.

    Attributes:
        ranks: steps of each rank; all ranks have equally many.
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
        """Returns the number of steps of each rank."""
        return len(self.ranks[0])

    @property
    def has_workers(self) -> bool:
        """Returns whether workers make exchanges, as in a process group."""
        return any(
            isinstance(op, Begin) and op.worker is not None
            for steps in self.ranks
            for step in steps
            for op in step
        )

    @property
    def begins_early(self) -> bool:
        """Returns whether a step waits for an exchange that an earlier step began."""
        return any(
            isinstance(op, Wait) and op.back > 0
            for steps in self.ranks
            for step in steps
            for op in step
        )

"""What the ranks of a job do in its steps, as planned or as recorded.

A rank works, begins exchanges with others, and waits for them. Traces become such steps, plans do,
and simulations run them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy.typing as npt

PerRank = npt.ArrayLike
"""Microseconds of ranks that do the same: one number, (ranks,), or (ranks, batches)."""


class Exchange(NamedTuple):
    """A collective, or the messages of a channel, of a step.

    Attributes:
        name: name for people.
        group: process group or channel. All ranks that begin any exchange of a group take part in
            each of them.
        number: number within the group and the step.
    """

    name: str
    group: str = ""
    number: int = 0


@dataclass(frozen=True)
class Messages:
    """One-sided puts to all ranks. They wait for no rank, and the main thread reads them.

    Attributes:
        latency_us: time until the messages can be seen.
        transfer_us: time that each rank's messages take on its host's link, if the link is free.
    """

    latency_us: float = 0.0
    transfer_us: PerRank = 0.0


@dataclass(frozen=True)
class PlannedCollective:
    """A collective by its parts. It begins when all ranks have begun it, and ends for all of them
    when the parts of all are done.

    Attributes:
        worker_us: time of the rank's worker on a core.
        pause_us: time of the worker on no core, after that.
        latency_us: time on no core, after all parts.
        transfer_us: time on the host's link, after the worker's, as of Messages.
        worker: the rank's thread that takes part, and does nothing else meanwhile.
    """

    worker_us: PerRank
    pause_us: PerRank = 0.0
    latency_us: float = 0.0
    transfer_us: PerRank = 0.0
    worker: str = "communication"


@dataclass(frozen=True)
class SeenCollective:
    """A collective as a rank's trace shows it. It begins when the workers of all ranks have come,
    and ends for each rank after the rank's own time.

    Attributes:
        worker_us: time of the rank's worker, from when all workers have come.
        worker: the rank's thread that takes part, and does nothing else meanwhile.
        latency_us: time until the worker comes, if it has nothing else to do.
        sent_bytes: this rank's bytes for all ranks, itself included; None: they were not recorded.
    """

    worker_us: float
    worker: str
    latency_us: float = 0.0
    sent_bytes: float | None = None


@dataclass(frozen=True)
class Work:
    """Work of the main thread, or of autograd's thread while the main thread waits for it.

    Attributes:
        us: time on a core.
        name: name for people.
        pause_us: time on no core, after the work.
        lag: steps by which the batch is older than the step.
    """

    us: PerRank
    name: str = "work"
    pause_us: PerRank = 0.0
    lag: int = 0


@dataclass(frozen=True)
class Begin:
    """The main thread begins an exchange, and goes on.

    Attributes:
        exchange: exchange that begins.
        by: way of its bytes.
        work_us: time to write the messages, or to hand the collective over; None: it is in the Work
            before.
        finish_us: time of the main thread once it has waited: to read, decode or copy.
        lag: steps by which the batch is older than the step.
    """

    exchange: Exchange
    by: Messages | PlannedCollective | SeenCollective
    work_us: PerRank | None = None
    finish_us: PerRank = 0.0
    lag: int = 0


@dataclass(frozen=True)
class Wait:
    """The main thread goes on when an exchange is done.

    Attributes:
        exchange: exchange that the thread waits for.
        lag: steps by which the batch of the exchange is older than the step.
    """

    exchange: Exchange
    lag: int = 0


Op = Work | Begin | Wait
Steps = Sequence[Sequence[Op]]
"""The ops of each step. After the last step comes the first again."""


@dataclass(frozen=True)
class Recording:
    """The steps of all ranks of a job, from traces.

    Attributes:
        ranks: steps of each rank; all ranks have equally many.
        trains: whether there was a backward.
        bound: iterations that the ranks could be apart.
    """

    ranks: Sequence[Steps]
    trains: bool = False
    bound: int = 0

    @property
    def steps(self) -> int:
        """Returns the number of steps of each rank."""
        return len(self.ranks[0])

    @property
    def has_workers(self) -> bool:
        """Returns whether workers make exchanges, as in a process group."""
        return any(isinstance(op, Begin) and not isinstance(op.by, Messages) for op in self._ops())

    @property
    def begins_early(self) -> bool:
        """Returns whether a step waits for an exchange that an earlier step began."""
        return any(isinstance(op, Wait) and op.lag > 0 for op in self._ops())

    def _ops(self) -> Iterator[Op]:
        for steps in self.ranks:
            for step in steps:
                yield from step

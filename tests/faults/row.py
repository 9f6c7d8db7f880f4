"""A row of the fault matrix, and the scene that its ranks play."""

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchrec_bls import BoundedLagChannel
from torchrec_bls.collective.channel import Arrival

# How a killed process exits, and what ranks raise that can't set something up together.
KILLED = -int(signal.SIGKILL)
SETUP = ("RendezvousError",)
# int64 numbers of a large message, 4 MB; a slot has room for some 500.
LARGE = 500_000

# Far above what any rank needs to get to where the fault strikes.
_LONGEST_HOLD = 30.0


class LeaveError(Exception):
    """Raised by a fault to make its rank return as if all was done."""


@dataclass
class Scene:
    """One rank on its way to the fault.

    Attributes:
        row: what is played.
        rank: of this process.
        group: that the channel is made over. A fault may change it before.
        folder: where the ranks leave notes for each other and for the judge.
        arguments: of the channel. A fault may change them before it is made.
        channel: that the fault strikes, once there is one.
        arrival: that the rank reads, at the moment "read".
        request: that is sent next. A fault may change it, or make it None: there are no more.
        stack: closes the channel when the rank is done or fails.
    """

    row: "Row"
    rank: int
    group: dist.ProcessGroup
    folder: Path
    arguments: dict[str, Any]
    channel: BoundedLagChannel | None = None
    arrival: Arrival | None = None
    request: Any = None
    stack: ExitStack = field(default_factory=ExitStack)

    def reach(self, moment: str, iteration: int | None = None) -> None:
        """Lets the fault strike if this is its rank, iteration and moment; holds the other ranks
        until then if the row says so."""
        if iteration is not None and iteration != self.row.iteration:
            return
        if self.rank != self.row.rank:
            if moment == self.row.held:
                self._hold()
        elif moment == self.row.moment:
            self.row.fault(self)

    def strike(self) -> None:
        """Notes the time of the fault, which frees the ranks that are held."""
        note = self.folder / "struck.tmp"
        note.write_text(repr(time.monotonic()))
        note.rename(self.folder / "struck")

    def _hold(self) -> None:
        end = time.monotonic() + _LONGEST_HOLD
        while not (self.folder / "struck").exists():
            if time.monotonic() > end:
                raise TimeoutError(f"rank {self.row.rank} did not get to its fault")
            time.sleep(0.005)
        time.sleep(self.row.hold_longer)


@dataclass(frozen=True)
class Row:
    """A fault, where it strikes and what becomes of every rank.

    Attributes:
        name: of the row.
        fault: called on `rank` when it reaches `moment` of `iteration`.
        errors: what the survivors may raise; PoisonedError is always possible as long as one of
            them raises one of these. Empty if the fault must not show.
        words: that the text of every survivor's error holds.
        end: error of the struck rank, None if it returns, or several of which it is one.
            "ProcessDied" if it doesn't get there.
        exit_code: of the struck rank.
        words_of_struck: that the text of the struck rank's own error holds.
        play: what the ranks do.
        end_of_request: error that stands for the answer of the struck request; None: it has one.
        moment: "create", "post", "wait", "read", "close" or, for models, "request", "forward",
            "output" (what the model returned is not waited for yet), "between" or "reshard".
        rank: that the fault strikes.
        iteration: in which.
        held: the moment of that iteration at which the others wait for the fault; None if they run.
        hold_longer: seconds by which they wait longer.
        world: number of ranks.
        bound: of the channel.
        deadline: of the channel, in seconds.
        within: seconds from the fault to the error, for every survivor; the deadline and 1 unless
            set.
        items: int64 numbers in a message; a slot has room for some 500.
        arguments: more arguments of the channel.
        own_store: whether the channel's store is a process of its own.
        fresh_interpreters: whether ranks end as scripts do.
    """

    name: str
    fault: Callable[[Scene], None]
    errors: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    end: str | tuple[str, ...] | None = None
    exit_code: int = 0
    words_of_struck: tuple[str, ...] = ()
    end_of_request: str | None = None
    play: Callable[[Scene], None] | None = None
    moment: str = "post"
    rank: int = 1
    iteration: int = 4
    held: str | None = None
    hold_longer: float = 0.0
    world: int = 3
    bound: int = 1
    deadline: float = 2.0
    within: float | None = None
    items: int = 16
    arguments: tuple[tuple[str, Any], ...] = ()
    own_store: bool = False
    fresh_interpreters: bool = False

    @property
    def limit(self) -> float:
        """Seconds from the fault to a survivor's error at most."""
        return self.deadline + 1 if self.within is None else self.within

"""The workers of a service, and their successors."""

import logging
import os
import signal
import socket
from collections import Counter
from dataclasses import dataclass

from torchrec_bls.serve.channel import Beat, Begun, Channel
from torchrec_bls.serve.places import LETTERS
from torchrec_bls.serve.processes.front_process import FrontProcess, Turn
from torchrec_bls.serve.processes.pause import Pause
from torchrec_bls.serve.processes.zygotes import Zygotes
from torchrec_bls.serve.status import DEATH, STALL, Status

# Seconds that a worker may take from its fork to its first beat.
_BEGINNING = 60.0
# Seconds that a worker may take to end: requests that it has begun get most of these.
_ENDING = 15.0
# Seconds that the front may take to get the answers of a worker that leaves, before that is told.
_LEAVING = 15.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """How long a worker may be silent.

    Attributes:
        ready: seconds after which it counts as one that does not answer, until it says something.
        alive: seconds after which it is killed.
    """

    ready: float
    alive: float


class Worker:
    """A worker, as the supervisor sees it.

    Args:
        name: its name.
        channel: connection to it.
        age: age of its zygote.
        patience: how long it may be silent.
        now: this moment.

    Attributes:
        name: see above.
        channel: see above.
        age: see above.
        pid: its process; 0 as long as that is not known.
        began: moment of its begin.
        has_begun: whether it has begun to answer requests.
        is_silent: whether it stands still, as far as can be seen.
        is_stalled: whether it was killed since it did nothing.
        is_ending: whether it was told to end.
    """

    def __init__(
        self, name: str, channel: Channel, age: int, patience: Patience, now: float
    ) -> None:
        self.age = age
        self.began = now
        self.has_begun = self.is_silent = self.is_stalled = self.is_ending = False
        self.name = name
        self._patience = patience
        self.channel = channel
        self.pid = 0
        self._heard = now
        self._told: Status | None = None
        self._end_by = float("inf")

    def look(self, now: float) -> str:
        """Takes what it says, and kills it if it is silent. Returns how it has ended, or "" while
        it lives."""
        for message in self.channel.received():
            if isinstance(message, Begun):
                self.pid = message.pid
                if self.is_ending:
                    self._signal(signal.SIGKILL)
            elif isinstance(message, Beat):
                self.has_begun, self._heard = True, now
            elif message is None:
                self.channel.close()
                return self._ending()
        silent = now - self._heard
        was_silent, self.is_silent = (
            self.is_silent,
            self.has_begun and silent > self._patience.ready,
        )
        if self.is_silent and not was_silent:
            _log.warning("worker %s is not ready: it does nothing for %.1f s", self.name, silent)
        if now > self._end_by:
            self._kill(f"has not ended for {_ENDING:g} s")
        elif (
            silent > (self._patience.alive if self.has_begun else _BEGINNING)
            and not self.is_stalled
        ):
            self.is_stalled = True
            self._kill(f"has done nothing for {silent:.1f} s")
        return ""

    def excuse(self, now: float) -> None:
        """Counts its silence from now on."""
        self._heard = now

    def tell(self, status: Status) -> None:
        """Tells it what it does not know yet."""
        if self._told != status and self.channel.send(status):
            self._told = status

    def leave(self, now: float) -> None:
        """Has it answer what it has begun, and end."""
        self.is_ending = True
        self._end_by = now + _ENDING
        # Before it answers, it does not listen to the former.
        self._signal(signal.SIGTERM if self.has_begun else signal.SIGKILL)

    def _kill(self, why: str) -> None:
        _log.warning("worker %s %s: it is killed", self.name, why)
        self._end_by = float("inf")
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.pid:  # its own as long as nobody has waited for it
            os.kill(self.pid, number)

    def _ending(self) -> str:
        if not self.pid:
            return "could not begin"
        self._signal(signal.SIGKILL)  # it is about to end, or nobody can talk to it
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return f"has ended with status {os.waitstatus_to_exitcode(status)}"


class Place:
    """Where a worker is to answer.

    Args:
        number: number of the worker, whose names are this and a letter.
        zygotes: who make it.
        starts: how many workers have begun, by cause.
        patience: how long a worker may be silent.
        front: who gives workers their requests, or None.

    Attributes:
        worker: the worker that is to answer there, or None.
        ending: how the last one has ended, or "".
    """

    def __init__(
        self,
        number: int,
        zygotes: Zygotes,
        starts: "Counter[str]",
        patience: Patience,
        front: FrontProcess | None = None,
    ) -> None:
        self.worker: Worker | None = None
        self.ending = ""
        self._names = [f"{number}{letter}" for letter in LETTERS]
        self._zygotes = zygotes
        self._starts = starts
        self._patience = patience
        self._front = front
        self._coming: Worker | None = None
        # Those that have been replaced, and until when the front may have requests of them.
        self._leaving: dict[Worker, float] = {}
        self._pause = Pause()
        self._cause = "start"

    @property
    def workers(self) -> list[Worker]:
        """Returns all of its workers that live."""
        return [*filter(None, (self.worker, self._coming)), *self._leaving]

    @property
    def pids(self) -> list[int]:
        """Returns the processes of its workers, as far as they are known."""
        return [each.pid for each in self.workers if each.pid]

    @property
    def answers(self) -> bool:
        """Returns whether it has a worker that answers."""
        return self.worker is not None and not self.worker.is_silent

    @property
    def turns(self) -> dict[str, Turn]:
        """Returns what its workers get of the front, by their names."""
        turns = dict.fromkeys((each.name for each in self._leaving), Turn.LEAVING)
        if self.worker is not None:
            turns[self.worker.name] = Turn.READY
        stalled = {each.name: Turn.STALLED for each in self.workers if each.is_silent}
        return {**turns, **stalled}

    @property
    def sockets(self) -> list[socket.socket]:
        """Returns where its workers say something."""
        return [each.channel.socket for each in self.workers]

    def excuse(self, now: float) -> None:
        """Counts the silence of its workers from now on."""
        for each in self.workers:
            each.excuse(now)

    def tell(self, status: Status) -> None:
        """Tells its worker what it does not know yet."""
        if self.worker is not None:
            self.worker.tell(status)

    def look(self, now: float, may_renew: bool) -> None:
        """Takes what its workers say, and begins another one in the place of one that has ended, or
        that is outdated.

        Args:
            now: this moment.
            may_renew: whether one that is outdated may be followed by another one.
        """
        self._look_at_leaving(now)
        for each in filter(None, (self.worker, self._coming)):
            ending = each.look(now)
            if ending:
                self._take_end(each, ending, now)
        if self._coming is not None and self._coming.has_begun:
            self._follow(self._coming, self.worker, now)
        if self.is_changing(may_renew) and self._coming is None and now >= self._pause.until:
            self._begin(now)

    def is_changing(self, may_renew: bool = True) -> bool:
        """Returns whether a worker is to come."""
        if self.worker is None:
            return True
        return may_renew and self.worker.age != self._zygotes.age

    def end(self, now: float) -> None:
        """Has all of its workers answer what they have begun, and end."""
        self._leaving = dict.fromkeys(self.workers, now)
        self.worker = self._coming = None
        for each in self._leaving:
            each.leave(now)

    def has_ended(self, now: float) -> bool:
        """Returns whether none of its workers lives any more."""
        self._look_at_leaving(now)
        return not self._leaving

    def _look_at_leaving(self, now: float) -> None:
        self._leaving = {each: by for each, by in self._leaving.items() if not each.look(now)}
        for each, by in self._leaving.items():
            # What the front has sent may not have arrived.
            if not each.is_ending and (
                self._front is None or self._front.is_done_with(each.name) or now > by
            ):
                each.leave(now)

    def _follow(self, coming: Worker, before: Worker | None, now: float) -> None:
        self.worker, self._coming = coming, None
        if before is not None:
            self._leaving[before] = now + _LEAVING

    def _begin(self, now: float) -> None:
        taken = {each.name for each in self.workers}
        free = [name for name in self._names if name not in taken]
        if not free:  # one that was replaced has not ended yet
            return
        channel = self._zygotes.fork(free[0])
        if channel is None:
            return
        self._coming = Worker(free[0], channel, self._zygotes.age, self._patience, now)
        self._starts[self._cause if self.worker is None else "renewal"] += 1

    def _take_end(self, ended: Worker, how: str, now: float) -> None:
        self.ending = f"worker {ended.name} {how}"
        pause = self._pause.ended(ended.began, now)
        when = f"in {pause:.1f} s" if pause else "now"
        _log.warning("%s: another one begins %s", self.ending, when)
        self._cause = STALL if ended.is_stalled else DEATH
        if ended is self.worker:
            self.worker = None
        else:
            self._coming = None

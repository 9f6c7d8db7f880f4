"""Starts the processes of a service, and others in the place of those that die."""

import ctypes
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from select import select

from torchrec_bls.serve.places import address
from torchrec_bls.serve.processes.front_process import FrontProcess
from torchrec_bls.serve.processes.keeper_process import KeeperProcess, Keeping
from torchrec_bls.serve.processes.plan import Plan
from torchrec_bls.serve.processes.workers import Patience, Place
from torchrec_bls.serve.processes.zygotes import Zygotes
from torchrec_bls.serve.status import Status

# Seconds between two looks at all processes.
_LOOK = 0.05
# Seconds without a beat after which a worker gets no requests.
_SILENT = 1.0
#: Seconds more after which it is killed. Machines with much to do let all stand still at times.
KILLED_AFTER = 4.0
# Seconds between two looks after which nobody is blamed for silence: all may have stood still.
_STOOD_STILL = 0.3
#: Seconds for which a service that is told to end answers on, but says that it is not ready.
LEAVING = 5.0
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, of linux/prctl.h
_log = logging.getLogger(__name__)


@dataclass
class Orders:
    """What an operator wants.

    Attributes:
        leave: the service is to end once proxies in front of it have noticed.
        end: the service is to end now.
        renew: all workers are to be replaced by those of a new zygote.
    """

    leave: bool = False
    end: bool = False
    renew: bool = False


class Supervisor:
    """Runs a service: a keeper, a zygote, the workers that it becomes, and a front if there is to
    be one. It is a context manager, which begins the first two.

    Args:
        plan: what a zygote makes.
        keeping: what the keeper keeps.
        workers: how many workers answer.
        front: the front, or None.
        orders: what an operator wants, which may change.
        killed_after: seconds after which a worker that gets no requests, since it stands still, is
            killed.
    """

    def __init__(
        self,
        plan: Plan,
        keeping: Keeping,
        workers: int,
        front: FrontProcess | None,
        orders: Orders,
        killed_after: float = KILLED_AFTER,
    ) -> None:
        self._plan = plan
        self._front = front
        self._orders = orders
        self._starts: Counter[str] = Counter()
        self._has_served = False
        self._looked = time.monotonic()
        self._leaves_by = float("inf")
        self._stack = ExitStack()
        with ExitStack() as stack:
            stack.enter_context(_orphans_come_here())
            self._keeper = stack.enter_context(KeeperProcess(keeping))
            self._zygotes = stack.enter_context(Zygotes(plan))
            # Its loop stands still during a batch, which may take a deadline.
            silent = max(_SILENT, plan.contract.deadline_ms / 1e3)
            patience = Patience(silent, silent + killed_after)
            self._places = [
                Place(number, self._zygotes, self._starts, patience, front)
                for number in range(1, workers + 1)
            ]
            stack.callback(self._end_workers)
            if front is not None:
                stack.enter_context(front)
            self._stack = stack.pop_all()

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self) -> None:
        """Looks after all processes until they are to end.

        Raises:
            RuntimeError: the service can't begin.
        """
        while not self._has_left(time.monotonic()):
            self._look(time.monotonic())
            self._await_news()

    def _has_left(self, now: float) -> bool:
        """Returns whether the service is to end now."""
        if self._orders.end or not self._orders.leave:
            return self._orders.end
        if self._leaves_by == float("inf"):
            self._leaves_by = now + LEAVING
            _log.info("not ready from now on: the service ends in %g s", LEAVING)
        # Nobody waits for a service that answers nothing.
        return now > self._leaves_by or not any(each.answers for each in self._places)

    def _look(self, now: float) -> None:
        if now - self._looked > _STOOD_STILL:
            for place in self._places:
                place.excuse(now)
        self._looked = now
        self._keeper.look()
        if self._orders.renew and self._has_served:
            self._orders.renew = False
            self._zygotes.renew()
        self._zygotes.look(now, self._keeper.has_tables)
        changing = next((each for each in self._places if each.is_changing()), None)
        for place in self._places:
            # One after the other, and nobody is replaced while another one is missing.
            place.look(now, may_renew=place is changing)
        ready = sum(each.answers for each in self._places)
        self._check_begin(ready)
        if self._front is not None and self._has_served:
            turns = [each.turns for each in self._places]
            self._front.look(now, {name: turn for each in turns for name, turn in each.items()})
        status = Status(
            self._keeper.refreshes,
            len(self._places),
            ready,
            dict(self._starts),
            self._orders.leave,
        )
        for place in self._places:
            place.tell(status)
        self._reap_orphans()

    def _check_begin(self, ready: int) -> None:
        if self._has_served:
            return
        self._has_served = ready > 0
        if self._has_served:
            self._say_where()
        for place in self._places:
            if place.ending and not self._has_served:
                raise RuntimeError(f"{place.ending} before it answered: its log says why")

    def _say_where(self) -> None:
        places = self._plan.places
        grpc = f", gRPC at {address(places.host, places.grpc_port)}" if places.grpc_port else ""
        _log.info(
            "serving model '%s' at http://%s%s",
            self._plan.name,
            address(places.host, places.port),
            grpc,
        )

    def _await_news(self) -> None:
        select([each for place in self._places for each in place.sockets], [], [], _LOOK)

    def _end_workers(self) -> None:
        for place in self._places:
            place.end(time.monotonic())
        left = self._places
        while left := [each for each in left if not each.has_ended(time.monotonic())]:
            self._await_news()

    def _reap_orphans(self) -> None:
        """Ends what is left of processes whose parents have ended, as process 1 has to. Others are
        no zombies for long: their owners wait for them."""
        if os.getpid() != 1:
            return
        multiprocessing.active_children()  # waits for its own
        mine = {pid for place in self._places for pid in place.pids}
        if self._front is not None:
            mine.add(self._front.pid)
        with suppress(ChildProcessError):
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None and found.si_pid not in mine:
                os.waitpid(found.si_pid, 0)


@contextmanager
def _orphans_come_here() -> Iterator[None]:
    """Has this process inherit the children of its children, as process 1 does."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SUBREAPER, 0, 0, 0, 0)

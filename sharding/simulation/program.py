"""The stages of each rank in a step, and the task graph of many steps."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .engine.task_graph import After, GraphBuilder, Machine, TaskGraph, Tasks
from .wire.link import Link

# A burst is at most a part of it late.
_BURST_PARTS = 4
_ROUNDING = 1e-6

PerRank = npt.ArrayLike
"""Microseconds of all ranks: one number, (ranks,), or (ranks, steps)."""


@dataclass(frozen=True)
class Compute:
    """Work of the main thread.

    Attributes:
        name: name of the stage.
        work: time on a core.
        pause: time on no core, after the work.
        lag: number of steps by which the stage's batch is older than the step.
    """

    name: str
    work: PerRank
    pause: PerRank = 0.0
    lag: int = 0


@dataclass(frozen=True)
class Post:
    """One-sided puts of the main thread to all ranks. They do not wait for any rank.

    Attributes:
        exchange: name of the channel.
        work: time to write the messages.
        latency: microseconds until the messages can be seen.
        slots: number of slots for each pair of ranks. Message n is written when its receiver has
            released message n - slots. None: the 2 (bound + 1) of the channels, where no rank ever
            waits for a slot (docs/design/channel.md).
        lag: number of steps by which the batch is older than the step.
        transfer: time that each rank's messages take on its host's link, after `work`, if the link
            is free.
    """

    exchange: str
    work: PerRank
    latency: float = 0.0
    slots: int | None = None
    lag: int = 0
    transfer: PerRank = 0.0


@dataclass(frozen=True)
class Collect:
    """The main thread waits for the messages of all ranks, reads and releases them.

    Attributes:
        exchange: name of the channel of the Post.
        work: time to read the messages.
        lag: number of steps by which the batch is older than the step.
    """

    exchange: str
    work: PerRank
    lag: int = 0


@dataclass(frozen=True)
class Begin:
    """The main thread hands a collective to the communication thread of its rank.

    The communication threads of all ranks begin it together: none can go on without the others.

    Attributes:
        collective: name of the collective.
        work: time of the main thread.
        worker: time of the communication thread on a core.
        latency: microseconds on no core, after all ranks have come.
        transfer: time on the host's link, after `worker`, as in a Post.
        pause: time of the communication thread on no core, after `worker`.
    """

    collective: str
    work: PerRank
    worker: PerRank
    latency: float = 0.0
    transfer: PerRank = 0.0
    pause: PerRank = 0.0


@dataclass(frozen=True)
class Finish:
    """The main thread waits for a collective of the same step.

    Attributes:
        collective: name of the collective that a Begin has begun.
        work: time of the work that follows.
    """

    collective: str
    work: PerRank = 0.0


Stage = Compute | Post | Collect | Begin | Finish


@dataclass(frozen=True)
class Ranks:
    """The ranks, and the cores that they run on.

    Attributes:
        count: number of ranks.
        cores: number of cores of each pool.
        pool: (count,), pool of each rank. A pool is a host, or the cores that ranks are pinned to.
        spin_us: see Machine.
        wake_us: see Machine.
        link: link of their hosts; None: an exchange takes only time on the ranks' cores.
    """

    count: int
    cores: tuple[int, ...]
    pool: tuple[int, ...]
    spin_us: float = 0.0
    wake_us: float = 0.0
    link: Link | None = None

    @classmethod
    def on_hosts(
        cls,
        count: int,
        per_host: int,
        cores: int,
        spin_us: float = 0.0,
        wake_us: float = 0.0,
        link_bytes_per_us: float | None = None,
        link_burst_bytes: float = 0.0,
    ) -> Ranks:
        """Returns ranks that fill hosts of so many `cores`, one host after the other."""
        hosts = -(-count // per_host)
        pool = tuple(rank // per_host for rank in range(count))
        link = None
        if link_bytes_per_us is not None:
            link = Link.of_hosts(link_bytes_per_us, count, per_host, link_burst_bytes)
        return cls(count, (cores,) * hosts, pool, spin_us, wake_us, link)

    def machine(self, communication_threads: bool, transfers: bool = False) -> Machine:
        """Returns the machine of all threads: first the main threads, then the communication
        threads, then a thread for each rank's bytes on the link."""
        pool = self.pool * (2 if communication_threads else 1)
        if self.link is None or not transfers:
            return Machine(self.cores, np.array(pool, np.intp), self.spin_us, self.wake_us)
        links = max(self.link.host) + 1
        pools = self.cores + (1,) * links
        pool += tuple(len(self.cores) + host for host in self.link.host)
        return Machine(pools, np.array(pool, np.intp), self.spin_us, self.wake_us, links)

    def threads_of(self, graph: TaskGraph) -> list[tuple[int, str]]:
        """Returns rank and name of each thread of `graph_of`."""
        machine = graph.machine
        linked = machine.links > 0
        names = ["main", "communication"][: len(machine.pool) // self.count - linked]
        names += ["link"] * linked
        return [(rank, name) for name in names for rank in range(self.count)]


def graph_of(
    program: Sequence[Stage], ranks: Ranks, batches: int, delays: npt.ArrayLike = 0.0
) -> TaskGraph:
    """Returns the tasks of `batches` batches on every rank.

    A stage with a lag begins so many steps later than one without. It goes on after the last batch
    until all batches are through.

    Args:
        program: program of a step.
        ranks: the ranks and their cores.
        batches: batches of each rank.
        delays: microseconds that a rank's main thread is delayed at the beginning of a step, one
            number or (ranks, batches).

    Raises:
        ValueError: a stage waits for something that no stage before it begins, or has a transfer
            without a link.
    """
    return _Graph(program, ranks, batches, delays).build()


class _Graph:
    def __init__(
        self, program: Sequence[Stage], ranks: Ranks, batches: int, delays: npt.ArrayLike
    ) -> None:
        self._program, self._ranks, self._batches = program, ranks, batches
        self._main = np.arange(ranks.count)
        talks = any(isinstance(stage, Begin) for stage in program)
        transfers = any(np.any(getattr(stage, "transfer", 0.0)) for stage in program)
        if transfers and ranks.link is None:
            raise ValueError("a stage has a transfer, but ranks have no link: give them one")
        self._worker = ranks.count + self._main
        self._link = self._worker + ranks.count * talks
        self._builder = GraphBuilder(ranks.machine(talks, transfers))
        # Of links with a burst, for each part of the bytes: time of all so far, and its tasks.
        self._on_link: deque[tuple[npt.NDArray[np.float64], Tasks]] = deque()
        if transfers and ranks.link and ranks.link.burst_bytes:
            begins = self._builder.add("link begins", self._link)
            self._on_link.append((np.zeros(ranks.count), begins))
        self._delays = np.broadcast_to(np.asarray(delays, float), (ranks.count, batches))
        # By exchange and batch: when all messages have come, and when they were released.
        self._arrived: dict[str, dict[int, Tasks]] = defaultdict(dict)
        self._released: dict[str, dict[int, Tasks]] = defaultdict(dict)
        self._step = 0

    def build(self) -> TaskGraph:
        longest = max(getattr(stage, "lag", 0) for stage in self._program)
        for step in range(self._batches + longest):
            self._step = step
            if step < self._batches and self._delays.any():
                self._builder.add("delay", self._main, pause=self._delays[:, step], step=step)
            for stage in self._program:
                batch = step - getattr(stage, "lag", 0)
                if 0 <= batch < self._batches:
                    self._add(stage, batch)
        return self._builder.build()

    def _add(self, stage: Stage, batch: int) -> None:
        match stage:
            case Compute(name, work, pause):
                self._on_main(name, work, batch, pause=pause)
            case Post():
                self._post(stage, batch)
            case Collect(exchange, work):
                arrived = self._arrived_of(exchange, batch)
                done = self._on_main(f"collect {exchange}", work, batch, [After(arrived)])
                self._released[exchange][batch] = done
            case Begin():
                self._begin(stage, batch)
            case Finish(collective, work):
                done = self._arrived_of(collective, batch)
                self._on_main(f"finish {collective}", work, batch, [After(done)])

    def _post(self, stage: Post, batch: int) -> None:
        after = []
        if stage.slots is not None and batch >= stage.slots:
            released = self._released[stage.exchange].get(batch - stage.slots)
            if released is None:
                raise ValueError(
                    f"exchange '{stage.exchange}' has {stage.slots} slots, but message "
                    f"{batch - stage.slots} is read after message {batch} is posted: it needs more"
                )
            after = [After(self._builder.join("slots", [After(released)], step=self._step))]
        posted = self._on_main(f"post {stage.exchange}", stage.work, batch, after)
        sent = self._over_link(stage.exchange, posted, stage.transfer, batch)
        self._arrived[stage.exchange][batch] = self._builder.join(
            f"{stage.exchange} arrived",
            [After(each, stage.latency) for each in sent],
            step=self._step,
        )

    def _begin(self, stage: Begin, batch: int) -> None:
        issued = self._on_main(f"begin {stage.collective}", stage.work, batch)
        together = self._builder.join("all begin", [After(issued)], step=self._step)
        done = self._builder.add(
            stage.collective,
            self._worker,
            self._of(stage.worker, batch),
            pause=self._of(stage.pause, batch),
            after=[After(together)],
            step=self._step,
        )
        sent = self._over_link(stage.collective, done, stage.transfer, batch)
        self._arrived[stage.collective][batch] = self._builder.join(
            f"{stage.collective} done",
            [After(each, stage.latency) for each in sent],
            step=self._step,
        )

    def _over_link(self, name: str, written: Tasks, transfer: PerRank, batch: int) -> list[Tasks]:
        """Adds the tasks that send the messages that `written` has written. Returns those after
        which they have passed the link.

        A burst passes at once if all bytes but a burst have had their time on the link.
        """
        if not np.any(transfer):
            return [written]
        link = self._ranks.link
        assert link is not None
        whole = np.broadcast_to(self._of(transfer, batch), len(self._main))
        if not link.burst_bytes:
            return [self._pass(name, whole, [After(written)])]
        burst = link.burst_us(whole)
        at_once = np.minimum(whole, burst)
        after = [After(written)]
        for part in (whole - at_once, *[at_once / _BURST_PARTS] * _BURST_PARTS):
            passed = self._pass(name, part, after)
            after = []
            self._on_link.append((self._on_link[-1][0] + part, passed))
        due = self._on_link[-1][0] - burst
        while len(self._on_link) > 1 and (self._on_link[1][0] <= due).all():
            self._on_link.popleft()
        reached = np.array([total >= due - _ROUNDING for total, _ in self._on_link])
        tasks = np.array([tasks for _, tasks in self._on_link])
        return [written, tasks[reached.argmax(axis=0), self._main]]

    def _pass(self, name: str, transfer: npt.NDArray[np.float64], after: list[After]) -> Tasks:
        return self._builder.add(
            f"{name} on the link", self._link, transfer, after=after, step=self._step
        )

    def _arrived_of(self, name: str, batch: int) -> Tasks:
        arrived = self._arrived[name].get(batch)
        if arrived is None:
            raise ValueError(
                f"'{name}' of batch {batch} is waited for in step {self._step}, but begun later"
            )
        return arrived

    def _on_main(
        self,
        name: str,
        work: PerRank,
        batch: int,
        after: Sequence[After] = (),
        pause: PerRank = 0.0,
    ) -> Tasks:
        return self._builder.add(
            name,
            self._main,
            self._of(work, batch),
            pause=self._of(pause, batch),
            after=after,
            step=self._step,
        )

    def _of(self, each: PerRank, batch: int) -> npt.NDArray[np.float64]:
        durations = np.asarray(each, float)
        return durations[:, batch] if durations.ndim == 2 else durations

"""The tasks of the steps of all ranks of a job."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchrec_bls.rank_steps import (
    Begin,
    Exchange,
    Messages,
    Op,
    PerRank,
    PlannedCollective,
    SeenCollective,
    Steps,
    Wait,
    Work,
)

from .engine.task_graph import After, Floats, GraphBuilder, Machine, TaskGraph, Tasks
from .wire.link import Link
from .wire.link_tasks import LinkTasks


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

    def machine(self, workers: Sequence[tuple[int, str]], link: Link | None) -> Machine:
        """Returns the machine of all threads: first the main threads, then workers, then a thread
        for each rank's bytes on the link.

        Args:
            workers: rank and name of each worker.
            link: link of the ranks' hosts, if any bytes pass it.
        """
        threads = [(rank, "main") for rank in range(self.count)] + list(workers)
        pool = [self.pool[rank] for rank, _ in threads]
        cores, links = self.cores, 0
        if link is not None:
            links = max(link.host) + 1
            pool += [len(cores) + host for host in link.host]
            cores += (1,) * links
            threads += [(rank, "link") for rank in range(self.count)]
        return Machine(
            cores, np.array(pool, np.intp), self.spin_us, self.wake_us, links, tuple(threads)
        )


@dataclass(frozen=True)
class Lane:
    """Ranks that do the same in the same order, each in its own time.

    Attributes:
        ranks: numbers of the ranks.
        steps: steps of each of them.
    """

    ranks: Tasks
    steps: Steps

    def begins(self) -> Iterator[Begin]:
        """Yields all that begins an exchange."""
        for step in self.steps:
            yield from (op for op in step if isinstance(op, Begin))

    def workers(self) -> set[str]:
        """Returns the names of the workers that each rank has."""
        return {op.by.worker for op in self.begins() if not isinstance(op.by, Messages)}

    def transfers(self) -> bool:
        """Returns whether any bytes pass a link."""
        return any(
            np.any(op.by.transfer_us)
            for op in self.begins()
            if not isinstance(op.by, SeenCollective)
        )

    def in_order(self, batches: int) -> Iterator[tuple[Op, int, int]]:
        """Yields each op with its batch and its step. What has a lag goes on after the last batch
        has begun, until all batches are through."""
        longest = max((op.lag for step in self.steps for op in step), default=0)
        for number in range(batches + longest):
            for op in self.steps[number % len(self.steps)]:
                batch = number - op.lag
                if 0 <= batch < batches:
                    yield op, batch, number


def graph_of(
    program: Sequence[Op], ranks: Ranks, batches: int, delays: npt.ArrayLike = 0.0
) -> TaskGraph:
    """Returns the tasks of `batches` batches of ranks that all have the same program.

    Args:
        program: ops of a step.
        ranks: the ranks and their cores.
        batches: batches of each rank.
        delays: microseconds that a rank's main thread is delayed at the beginning of a step, one
            number or (ranks, batches).

    Raises:
        ValueError: a rank waits for something that it begins later or never, or there is a transfer
            without a link.
    """
    late = np.broadcast_to(np.asarray(delays, float), (ranks.count, batches))
    delay = [Work(0.0, "delay", pause_us=late)] if late.any() else []
    return graph_of_lanes([Lane(np.arange(ranks.count), [[*delay, *program]])], ranks, batches)


def graph_of_lanes(lanes: Sequence[Lane], ranks: Ranks, batches: int) -> TaskGraph:
    """Returns the tasks of `batches` batches on every rank.

    Args:
        lanes: lanes, which together have each rank once.
        ranks: the ranks and their cores.
        batches: batches of each rank.

    Raises:
        ValueError: a rank waits for something that it begins later or never, ranks wait for each
            other in a circle, or there is a transfer without a link.
    """
    return _Graph(lanes, ranks, batches).build()


@dataclass
class _Meeting:
    """An exchange of a batch, by lane: what has begun it, and when it was done."""

    begun: dict[int, tuple[Tasks, Begin]] = field(default_factory=dict)
    done: dict[int, Tasks] = field(default_factory=dict)


_Key = tuple[Exchange, int]
"""An exchange of a batch."""


class _Graph:
    """Adds tasks lane by lane. Each lane goes on as far as the others let it."""

    def __init__(self, lanes: Sequence[Lane], ranks: Ranks, batches: int) -> None:
        self._lanes = lanes
        self._in_order = [lane.in_order(batches) for lane in lanes]
        # How many lanes take part in the exchanges of each group.
        self._takes_part = Counter(
            group for lane in lanes for group in {begin.exchange.group for begin in lane.begins()}
        )
        workers = sorted(
            (rank, name)
            for lane in lanes
            for name in lane.workers()
            for rank in lane.ranks.tolist()
        )
        thread = {worker: number for number, worker in enumerate(workers, ranks.count)}
        self._workers = {
            (number, name): np.array([thread[rank, name] for rank in lane.ranks.tolist()])
            for number, lane in enumerate(lanes)
            for name in lane.workers()
        }
        transfers = any(lane.transfers() for lane in lanes)
        if transfers and ranks.link is None:
            raise ValueError("a step has a transfer, but ranks have no link: give them one")
        link = ranks.link if transfers else None
        self._builder = GraphBuilder(ranks.machine(workers, link))
        self._link_tasks = None
        if link is not None:
            threads = ranks.count + len(workers) + np.arange(ranks.count)
            self._link_tasks = LinkTasks(self._builder, link, threads)
        self._last: dict[int, Tasks] = {}
        self._meetings: defaultdict[_Key, _Meeting] = defaultdict(_Meeting)
        # The collectives that each lane's workers were given and have not begun.
        self._queues: defaultdict[tuple[int, str], deque[_Key]] = defaultdict(deque)

    def build(self) -> TaskGraph:
        current = [next(ops, None) for ops in self._in_order]
        while any(item is not None for item in current):
            before = list(current)
            for lane, ops in enumerate(self._in_order):
                while (item := current[lane]) is not None and self._add(lane, *item):
                    current[lane] = next(ops, None)
            if all(old is new for old, new in zip(before, current, strict=True)):
                self._refuse_circle(current)
        return self._builder.build()

    def _refuse_circle(self, current: Sequence[tuple[Op, int, int] | None]) -> None:
        stuck = [
            f"rank {rank} for {item[0].exchange.name}"
            for lane, item in zip(self._lanes, current, strict=True)
            if item is not None and isinstance(item[0], Wait)
            for rank in lane.ranks
        ]
        raise ValueError(f"ranks wait for each other in a circle: {', '.join(stuck)}")

    def _add(self, lane: int, op: Op, batch: int, step: int) -> bool:
        """Adds an op. Returns whether that was already possible."""
        match op:
            case Work(us, name, pause):
                self._on_main(lane, name, us, batch, step, pause=pause)
            case Begin():
                self._begin(lane, op, batch, step)
            case Wait(exchange):
                meeting = self._meetings[exchange, batch]
                if lane not in meeting.begun:
                    raise ValueError(
                        f"'{exchange.name}' of batch {batch} is waited for in step {step}, but "
                        "begun later"
                    )
                if lane not in meeting.done:
                    return False
                _, begin = meeting.begun[lane]
                verb = "collect" if isinstance(begin.by, Messages) else "finish"
                after = [After(meeting.done[lane])]
                name = f"{verb} {exchange.name}"
                self._on_main(lane, name, begin.finish_us, batch, step, after=after)
        return True

    def _begin(self, lane: int, begin: Begin, batch: int, step: int) -> None:
        if begin.work_us is not None:
            verb = "post" if isinstance(begin.by, Messages) else "begin"
            self._on_main(lane, f"{verb} {begin.exchange.name}", begin.work_us, batch, step)
        key = begin.exchange, batch
        meeting = self._meetings[key]
        meeting.begun[lane] = self._last[lane], begin
        if not isinstance(begin.by, Messages):
            self._queues[lane, begin.by.worker].append(key)
            self._run_workers(key, step)
        elif self._all_have_begun(key):
            written = {number: tasks for number, (tasks, _) in meeting.begun.items()}
            self._end_together(key, f"{begin.exchange.name} arrived", written, step)

    def _all_have_begun(self, key: _Key) -> bool:
        return len(self._meetings[key].begun) == self._takes_part[key[0].group]

    def _run_workers(self, key: _Key, step: int) -> None:
        """Runs a collective that all lanes have begun and all workers have come to, and those that
        the workers come to next."""
        ready = [key]
        while ready:
            key = ready.pop()
            queues = [
                self._queues[lane, _collective(begin).worker]
                for lane, (_, begin) in self._meetings[key].begun.items()
            ]
            if self._all_have_begun(key) and all(queue and queue[0] == key for queue in queues):
                self._run_collective(key, step)
                for queue in queues:
                    queue.popleft()
                ready += [queue[0] for queue in queues if queue]

    def _run_collective(self, key: _Key, step: int) -> None:
        (exchange, batch), meeting = key, self._meetings[key]
        came = [self._come(lane, *begun, step) for lane, begun in meeting.begun.items()]
        together = self._builder.join("all begin", came, step=step)
        for lane, (_, begin) in meeting.begun.items():
            by = _collective(begin)
            meeting.done[lane] = self._builder.add(
                exchange.name,
                self._workers[lane, by.worker],
                _of_batch(by.worker_us, batch),
                pause=_of_batch(by.pause_us, batch) if isinstance(by, PlannedCollective) else 0.0,
                after=[After(together)],
                step=step,
            )
        if any(isinstance(begin.by, PlannedCollective) for _, begin in meeting.begun.values()):
            self._end_together(key, f"{exchange.name} done", meeting.done, step)

    def _come(self, lane: int, begun: Tasks, begin: Begin, step: int) -> After:
        """Returns what a collective waits for before it begins."""
        by = _collective(begin)
        if isinstance(by, PlannedCollective):
            return After(begun)
        name, after = f"{begin.exchange.name} begins", [After(begun, by.latency_us)]
        return After(
            self._builder.add(name, self._workers[lane, by.worker], after=after, step=step)
        )

    def _end_together(self, key: _Key, name: str, written: Mapping[int, Tasks], step: int) -> None:
        """Ends an exchange for all ranks, when what each lane has written is there."""
        (exchange, batch), meeting = key, self._meetings[key]
        there: list[After] = []
        for lane, (_, begin) in meeting.begun.items():
            by, passed = begin.by, [written[lane]]
            assert not isinstance(by, SeenCollective)
            if self._link_tasks is not None and np.any(by.transfer_us):
                transfer = np.broadcast_to(_of_batch(by.transfer_us, batch), written[lane].shape)
                passed = self._link_tasks.send(exchange.name, written[lane], transfer, step)
            there += [After(tasks, by.latency_us) for tasks in passed]
        meeting.done = dict.fromkeys(meeting.begun, self._builder.join(name, there, step=step))

    def _on_main(
        self,
        lane: int,
        name: str,
        work: PerRank,
        batch: int,
        step: int,
        *,
        pause: PerRank = 0.0,
        after: Sequence[After] = (),
    ) -> None:
        self._last[lane] = self._builder.add(
            name,
            self._lanes[lane].ranks,
            _of_batch(work, batch),
            pause=_of_batch(pause, batch),
            after=after,
            step=step,
        )


def _collective(begin: Begin) -> PlannedCollective | SeenCollective:
    assert not isinstance(begin.by, Messages)
    return begin.by


def _of_batch(each: PerRank, batch: int) -> Floats:
    durations = np.asarray(each, float)
    return durations[:, batch] if durations.ndim == 2 else durations

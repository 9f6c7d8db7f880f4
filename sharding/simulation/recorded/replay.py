"""Replays a recorded job with other delays or with lag: its task graph, and its steps' times."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..engine.task_graph import After, Floats, GraphBuilder, Machine, TaskGraph, Tasks
from ..engine.timeline import Timeline, simulate
from .recording import Begin, Exchange, Op, Recording, Wait, Work
from .stages import Staged, staged

_BEGINS, _ENDS = "batch begins", "batch ends"


@dataclass(frozen=True)
class Replay:
    """A recorded job with one bound.

    Attributes:
        bound: iterations that ranks may be apart.
        step_us: mean time from one batch to the next, over all ranks.
        step_percentiles_us: the 50th, 95th and 99th percentile of these times.
        latency_us: median time of a batch on its rank, from its beginning to its end.
        timeline: the simulation.
        threads: rank and name of each thread.
    """

    bound: int
    step_us: float
    step_percentiles_us: tuple[float, float, float]
    latency_us: float
    timeline: Timeline
    threads: Sequence[tuple[int, str]]


def replay(recording: Recording, bound: int, delays: Floats) -> Replay:
    """Replays a recorded job.

    Every thread has a core of its own: the recorded times already have what threads took from each
    other. With a bound, collectives are messages that nobody answers. The main thread reads them.

    Args:
        recording: recorded job; its steps are replayed in turn, one for each batch.
        bound: iterations that ranks may be apart.
        delays: (ranks, batches), microseconds that a rank is delayed at the beginning of a batch,
            in addition to what was recorded.

    Raises:
        ValueError: the job can't have the bound, or had it already; or the delays are for another
            number of ranks; or ranks wait for each other in a circle.
    """
    _refuse(recording, bound, delays)
    built = _Graph(recording, bound, delays)
    timeline = simulate(built.build())
    graph = timeline.graph

    def of_batches(name: str, times: Floats) -> Floats:
        tasks = graph.called(name)
        tasks = tasks[np.lexsort((graph.step[tasks], graph.thread[tasks]))]
        return times[tasks].reshape(delays.shape)

    starts = of_batches(_BEGINS, timeline.start)
    ends = of_batches(_ENDS, timeline.end)
    steps = np.diff(ends.max(axis=0), prepend=0.0)
    return Replay(
        bound=bound,
        step_us=float(ends.max()) / delays.shape[1],
        step_percentiles_us=tuple(np.percentile(steps, [50, 95, 99]).tolist()),
        latency_us=float(np.median(ends - starts)),
        timeline=timeline,
        threads=built.threads,
    )


def _refuse(recording: Recording, bound: int, delays: Floats) -> None:
    ranks = len(recording.ranks)
    if bound < 0:
        raise ValueError(f"bound is {bound}, but a bound is 0 or more steps")
    if recording.bound > 0:
        raise ValueError(
            f"the job was recorded at bound {recording.bound}: only one at bound 0 can be replayed"
        )
    if bound > 0 and recording.trains:
        raise ValueError(
            f"bound is {bound}, but the recorded job trains, and only bound 0 does: rows would be "
            "out of date"
        )
    if bound > 0 and recording.begins_early:
        raise ValueError(
            f"bound is {bound}, but recorded steps wait for exchanges that earlier steps began: "
            "only bound 0 can be replayed"
        )
    if delays.ndim != 2 or len(delays) != ranks or delays.shape[1] == 0:
        raise ValueError(
            f"delays have shape {delays.shape}, but must be of {ranks} ranks and 1 or more batches"
        )


@dataclass
class _Meeting:
    """An exchange of a batch: which ranks have begun it, and when it was done."""

    begun: dict[int, tuple[Tasks, Begin]]
    done: dict[int, Tasks]


class _Graph:
    """Adds tasks rank by rank. Each rank goes on as far as the others let it."""

    def __init__(self, recording: Recording, bound: int, delays: Floats) -> None:
        self._members = recording.members
        self._bound, self._delays = bound, delays
        ranks = len(recording.ranks)
        self._ranks = range(ranks)
        steps: Staged = (
            staged(recording)
            if bound > 0
            else [[[list(step)] for step in steps] for steps in recording.ranks]
        )
        self._lanes = [self._lane(own, delays.shape[1]) for own in steps]
        workers = _workers(recording) if bound == 0 else []
        self._thread = {worker: ranks + i for i, worker in enumerate(workers)}
        names = [(rank, f"worker {number}") for rank, number in workers]
        self.threads = [(rank, "main") for rank in self._ranks] + names
        pool = np.array([rank for rank, _ in self.threads], np.intp)
        cores = tuple(np.bincount(pool, minlength=ranks).tolist())
        self._builder = GraphBuilder(Machine(cores, pool))
        self._last: list[Tasks] = []
        self._meetings: defaultdict[tuple[Exchange, int], _Meeting] = defaultdict(
            lambda: _Meeting({}, {})
        )
        # The exchanges that each worker was given and has not begun, by its thread.
        self._queue: defaultdict[int, deque[tuple[Exchange, int]]] = defaultdict(deque)

    def build(self) -> TaskGraph:
        self._last = [self._builder.add("job begins", [rank]) for rank in self._ranks]
        current = [next(lane, None) for lane in self._lanes]
        while any(each is not None for each in current):
            before = list(current)
            for rank, lane in enumerate(self._lanes):
                while (item := current[rank]) is not None and self._add(rank, *item):
                    current[rank] = next(lane, None)
            if all(old is new for old, new in zip(before, current, strict=True)):
                stuck = {rank: item[0] for rank, item in enumerate(current) if item is not None}
                raise ValueError(
                    "ranks wait for each other in a circle: "
                    + ", ".join(f"rank {rank} for {_name(op)}" for rank, op in stuck.items())
                )
        return self._builder.build()

    def _lane(
        self, steps: Sequence[Sequence[Sequence[Op]]], batches: int
    ) -> Iterator[tuple[Op | str, int]]:
        """Yields each op of a rank, and the op's batch."""
        stages = len(steps[0])
        for time in range(batches + (stages - 1) * self._bound):
            for stage in range(stages):
                batch = time - stage * self._bound
                if not 0 <= batch < batches:
                    continue
                if stage == 0:
                    yield _BEGINS, batch
                for op in steps[batch % len(steps)][stage]:
                    yield op, batch
                if stage == stages - 1:
                    yield _ENDS, batch

    def _add(self, rank: int, op: Op | str, batch: int) -> bool:
        """Adds an op. Returns whether that was already possible."""
        match op:
            case str():
                pause = float(self._delays[rank, batch]) if op == _BEGINS else 0.0
                self._on_main(rank, op, 0.0, batch, pause=pause)
            case Work(us):
                self._on_main(rank, "work", us, batch)
            case Begin():
                self._begin(rank, op, batch)
            case Wait(exchange, back):
                meeting = self._meetings.get((exchange, batch - back))
                if meeting is None or rank not in meeting.begun:
                    return True  # it began before the recording
                if rank not in meeting.done:
                    return False
                own = meeting.begun[rank][1]
                reading = own.took_us if self._is_one_sided(own) else 0.0
                after = [After(meeting.done[rank])]
                self._on_main(rank, f"wait for {exchange.name}", reading, batch, after)
        return True

    def _is_one_sided(self, begin: Begin) -> bool:
        return self._bound > 0 or begin.worker is None

    def _begin(self, rank: int, begin: Begin, batch: int) -> None:
        key = begin.exchange, batch
        meeting = self._meetings[key]
        meeting.begun[rank] = self._last[rank], begin
        if not self._is_one_sided(begin):
            self._queue[self._thread_of(rank, begin)].append(key)
            self._run_workers(key)
        elif len(meeting.begun) == len(self._members[begin.exchange.group]):
            posts = [After(task) for task, _ in meeting.begun.values()]
            arrived = self._builder.join(f"{begin.exchange.name} arrived", posts, step=batch)
            meeting.done = dict.fromkeys(meeting.begun, arrived)

    def _run_workers(self, key: tuple[Exchange, int]) -> None:
        """Runs an exchange that all ranks have begun and all workers have come to, and what
        follows."""
        ready = [key]
        while ready:
            key = ready.pop()
            (exchange, batch), meeting = key, self._meetings[key]
            threads = {
                rank: self._thread_of(rank, begin) for rank, (_, begin) in meeting.begun.items()
            }
            if len(threads) < len(self._members[exchange.group]) or any(
                self._queue[thread][0] != key for thread in threads.values()
            ):
                continue
            came = [
                self._builder.add(
                    f"{exchange.name} begins",
                    [threads[rank]],
                    after=[After(task, begin.latency_us)],
                    step=batch,
                )
                for rank, (task, begin) in meeting.begun.items()
            ]
            together = self._builder.join("all begin", [After(task) for task in came], step=batch)
            for rank, (_, begin) in meeting.begun.items():
                meeting.done[rank] = self._builder.add(
                    exchange.name,
                    [threads[rank]],
                    begin.took_us,
                    after=[After(together)],
                    step=batch,
                )
                queue = self._queue[threads[rank]]
                queue.popleft()
                if queue:
                    ready.append(queue[0])

    def _thread_of(self, rank: int, begin: Begin) -> int:
        assert begin.worker is not None
        return self._thread[rank, begin.worker]

    def _on_main(
        self,
        rank: int,
        name: str,
        work: float,
        batch: int,
        after: Sequence[After] = (),
        pause: float = 0.0,
    ) -> None:
        self._last[rank] = self._builder.add(
            name, [rank], work, pause=pause, after=after, step=batch
        )


def _workers(recording: Recording) -> list[tuple[int, int]]:
    """Returns rank and number of all workers."""
    return sorted(
        {
            (rank, op.worker)
            for rank, steps in enumerate(recording.ranks)
            for op in _ops(steps)
            if isinstance(op, Begin) and op.worker is not None
        }
    )


def _ops(steps: Iterable[Iterable[Op]]) -> Iterator[Op]:
    for step in steps:
        yield from step


def _name(op: Op | str) -> str:
    return op.exchange.name if isinstance(op, (Begin, Wait)) else str(op)

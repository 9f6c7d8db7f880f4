"""Tasks of threads that share cores, event by event."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from .task_graph import NO_TASK, NO_THREAD, Floats, TaskGraph, Tasks

_NEVER = float("inf")


def run_shared(graph: TaskGraph) -> tuple[Floats, Floats]:
    """Returns start and end of each task, microseconds.

    A pool of c cores runs n threads at min(1, c / n) each. A thread that waits runs as well, for
    `spin_us`; then it sleeps, and needs `wake_us` to begin again.
    """
    run = _Run(graph)
    run.all_of_them()
    return np.array(run.start), np.array(run.end)


class _Pool:
    """Cores, and the threads that run on them.

    `served` is what a thread that has run all the time got by now, in microseconds on a core of its
    own. A task that begins now ends when `served` has grown by its work, whoever comes and goes.
    """

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._running = 0
        self._served = 0.0
        self._at = 0.0
        self._ends: list[tuple[float, int]] = []

    def add(self, now: float, task: int, work: float) -> None:
        """Begins a task."""
        self._advance(now)
        self._running += 1
        heappush(self._ends, (self._served + work, task))

    def spin(self, now: float, threads: int) -> None:
        """Adds threads that run without end; negative numbers take them away."""
        self._advance(now)
        self._running += threads

    def next_end(self) -> float:
        """Returns when a task ends if nobody comes or goes before."""
        if not self._ends:
            return _NEVER
        left = max(self._ends[0][0] - self._served, 0.0)
        return self._at + left / self._rate()

    def pop(self, now: float) -> int:
        """Ends the task whose end is next."""
        self._advance(now)
        end, task = heappop(self._ends)
        self._served = max(self._served, end)  # but for roundings it is
        self._running -= 1
        return task

    def _advance(self, now: float) -> None:
        if self._running:
            self._served += (now - self._at) * self._rate()
        self._at = now

    def _rate(self) -> float:
        return min(1.0, self._cores / self._running)


class _Run:
    """A simulation under way: what tasks still wait for, and what is about to happen."""

    def __init__(self, graph: TaskGraph) -> None:
        machine = graph.machine
        self._spin_us, self._wake_us = machine.spin_us, machine.wake_us
        self._pools = [_Pool(cores) for cores in machine.cores]
        # Lists, which Python indexes several times faster than arrays.
        self._pool_of = machine.pool.tolist()
        self._thread = graph.thread.tolist()
        self._work, self._pause = graph.work.tolist(), graph.pause.tolist()
        self._missing = np.diff(graph.first_edge).tolist()
        self._next_on_thread = _next_on_thread(graph).tolist()
        self._has_turn = (graph.before == NO_TASK).tolist()
        self._free = [0.0] * len(graph)
        self._spins = [False] * len(graph)
        by_source = np.argsort(graph.source, kind="stable")
        self._targets = graph.targets[by_source].tolist()
        self._latency = graph.latency[by_source].tolist()
        counts = np.bincount(graph.source, minlength=len(graph))
        self._first_target = np.concatenate([[0], np.cumsum(counts)]).tolist()
        self.start = [0.0] * len(graph)
        self.end = [0.0] * len(graph)
        # What happens at a time; the count keeps the order of what happens at once.
        self._events: list[tuple[float, int, Callable[[float, int], None], int]] = []
        self._count = 0
        self._next_end = [_NEVER] * len(self._pools)

    def all_of_them(self) -> None:
        """Runs to the end."""
        for task, has_turn in enumerate(self._has_turn):
            if has_turn:
                self._take_turn(0.0, task)
        while self._events:
            now, _, event, argument = heappop(self._events)
            event(now, argument)

    def _at(self, time: float, event: Callable[[float, int], None], argument: int) -> None:
        self._count += 1
        heappush(self._events, (time, self._count, event, argument))

    def _take_turn(self, now: float, task: int) -> None:
        """The task before it on its thread is done."""
        self._has_turn[task] = True
        self._free[task] = now
        if self._missing[task] == 0:
            self._begin(now, task)
        elif self._spin_us > 0 and self._thread[task] != NO_THREAD:
            self._spins[task] = True
            self._change(now, self._pool_of[self._thread[task]], 1)
            self._at(now + self._spin_us, self._sleep, task)

    def _sleep(self, now: float, task: int) -> None:
        if self._spins[task]:
            self._spins[task] = False
            self._change(now, self._pool_of[self._thread[task]], -1)

    def _arrive(self, now: float, task: int) -> None:
        """One of the tasks that it waits for is done, and the news has come."""
        self._missing[task] -= 1
        if self._missing[task] or not self._has_turn[task]:
            return
        if self._thread[task] == NO_THREAD:
            self._begin(now, task)
            return
        slept = now - self._free[task] > self._spin_us
        self._sleep(now, task)
        if slept and self._wake_us > 0:
            self._at(now + self._wake_us, self._begin, task)
        else:
            self._begin(now, task)

    def _begin(self, now: float, task: int) -> None:
        self.start[task] = now
        if self._work[task] == 0:
            self._done(now, task)
            return
        pool = self._pool_of[self._thread[task]]
        self._pools[pool].add(now, task, self._work[task])
        self._reckon(pool)

    def _change(self, now: float, pool: int, threads: int) -> None:
        self._pools[pool].spin(now, threads)
        self._reckon(pool)

    def _reckon(self, pool: int) -> None:
        """Says when the pool's next task ends, now that its threads are others."""
        self._next_end[pool] = self._pools[pool].next_end()
        if self._next_end[pool] < _NEVER:
            self._at(self._next_end[pool], self._end_in_pool, pool)

    def _end_in_pool(self, now: float, pool: int) -> None:
        if now != self._next_end[pool]:
            return  # reckoned before its threads changed
        task = self._pools[pool].pop(now)
        self._reckon(pool)
        self._done(now, task)

    def _done(self, now: float, task: int) -> None:
        """Its work is done, its pause begins."""
        if self._pause[task] > 0:
            self._at(now + self._pause[task], self._leave, task)
        else:
            self._leave(now, task)

    def _leave(self, now: float, task: int) -> None:
        self.end[task] = now
        for edge in range(self._first_target[task], self._first_target[task + 1]):
            # By way of the events, lest long chains of tasks without work nest.
            self._at(now + self._latency[edge], self._arrive, self._targets[edge])
        following = self._next_on_thread[task]
        if following != NO_TASK:
            self._at(now, self._take_turn, following)


def _next_on_thread(graph: TaskGraph) -> Tasks:
    following = np.full(len(graph), NO_TASK)
    tasks = np.flatnonzero(graph.before != NO_TASK)
    following[graph.before[tasks]] = tasks
    return following

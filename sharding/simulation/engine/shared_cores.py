"""Runs tasks of threads that share cores, event by event."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from .task_graph import NO_TASK, NO_THREAD, Floats, TaskGraph, Tasks

_NEVER = float("inf")
_Event = Callable[[float, int], None]


def run_shared(graph: TaskGraph) -> tuple[Floats, Floats]:
    """Returns start and end of each task, microseconds.

    A pool of c cores runs n threads at min(1, c / n) each. A waiting thread runs as well, for
    `spin_us`. Then it sleeps, and needs `wake_us` to begin again.
    """
    run = _Run(graph)
    run.all_of_them()
    return np.array(run.start), np.array(run.end)


class _Pool:
    """Cores, and the threads that run on them.

    `served` is the work that a thread has done by now if it has always run, in microseconds on a
    core of its own. A task that begins now ends when `served` has grown by its work, no matter
    which other threads come and go.
    """

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._running = 0
        self._rate = 1.0
        self._served = 0.0
        self._at = 0.0
        self._ends: list[tuple[float, int]] = []

    def add(self, now: float, task: int, work: float) -> None:
        """Begins a task."""
        self.change(now, 1)
        heappush(self._ends, (self._served + work, task))

    def change(self, now: float, threads: int) -> None:
        """Adds threads that run; a negative number takes threads away."""
        self._served += (now - self._at) * self._rate
        self._at = now
        self._running += threads
        self._rate = min(1.0, self._cores / self._running) if self._running else 1.0

    def next_end(self) -> float:
        """Returns when the next task ends if no thread comes or goes before."""
        if not self._ends:
            return _NEVER
        return self._at + max(self._ends[0][0] - self._served, 0.0) / self._rate

    def pop(self, now: float) -> int:
        """Ends the task whose end is next."""
        end, task = heappop(self._ends)
        self.change(now, -1)
        self._served = max(self._served, end)  # equal, but for rounding
        return task


class _Run:
    """A simulation under way: what tasks still wait for, and the coming events."""

    def __init__(self, graph: TaskGraph) -> None:
        machine = graph.machine
        self._spin_us, self._wake_us = machine.spin_us, machine.wake_us
        self._pools = [_Pool(cores) for cores in machine.cores]
        # Lists, which Python indexes several times faster than arrays.
        thread = graph.thread
        self._pool_of = machine.pool[thread].tolist()  # of tasks; meaningless for one on no thread
        self._can_sleep = (machine.sleeps[thread] & (thread != NO_THREAD)).tolist()
        self._work, self._pause = graph.work.tolist(), graph.pause.tolist()
        self._missing = np.diff(graph.first_edge).tolist()
        self._next_on_thread = _next_on_thread(graph).tolist()
        self._first_turns = np.flatnonzero(graph.before == NO_TASK).tolist()
        # When a task's turn came, and when its last known arrival came.
        self._free = [0.0] * len(graph)
        self._ready = [0.0] * len(graph)
        self._waits = [False] * len(graph)
        self._spins = [False] * len(graph)
        by_source = np.argsort(graph.source, kind="stable")
        self._targets = graph.targets[by_source].tolist()
        self._latency = graph.latency[by_source].tolist()
        counts = np.bincount(graph.source, minlength=len(graph))
        self._first_target = np.concatenate([[0], np.cumsum(counts)]).tolist()
        self.start = [0.0] * len(graph)
        self.end = [0.0] * len(graph)
        # Future events by time. The count keeps the order of events at one time.
        self._events: list[tuple[float, int, _Event, int]] = []
        self._count = 0
        # Events at this time. They are not nested, since chains of tasks without work may be long.
        self._now: deque[tuple[_Event, int]] = deque()
        # For each pool, when its next task ends, and when the simulation looks at it.
        self._next_end = [_NEVER] * len(self._pools)
        self._looks = [_NEVER] * len(self._pools)

    def all_of_them(self) -> None:
        """Runs to the end."""
        self._now.extend((self._take_turn, task) for task in self._first_turns)
        now = 0.0
        while self._now or self._events:
            if self._now:
                event, argument = self._now.popleft()
            else:
                now, _, event, argument = heappop(self._events)
            event(now, argument)

    def _at(self, time: float, event: _Event, argument: int) -> None:
        self._count += 1
        heappush(self._events, (time, self._count, event, argument))

    def _take_turn(self, now: float, task: int) -> None:
        """Notes that the task before it on its thread is done."""
        self._free[task] = now
        if self._missing[task] == 0 and self._ready[task] <= now:
            self._begin(now, task)
            return
        self._waits[task] = True
        if self._spin_us > 0 and self._can_sleep[task]:
            self._spins[task] = True
            self._change(now, self._pool_of[task], 1)
            self._at(now + self._spin_us, self._sleep, task)

    def _sleep(self, now: float, task: int) -> None:
        if self._spins[task]:
            self._spins[task] = False
            self._change(now, self._pool_of[task], -1)

    def _arrive(self, now: float, task: int) -> None:
        """Notes that the last of the things it waits for has come."""
        if not self._waits[task]:
            return  # its turn comes later, or came at this moment
        self._waits[task] = False
        slept = self._can_sleep[task] and now - self._free[task] > self._spin_us
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
        pool = self._pool_of[task]
        self._pools[pool].add(now, task, self._work[task])
        self._reckon(pool)

    def _change(self, now: float, pool: int, threads: int) -> None:
        self._pools[pool].change(now, threads)
        self._reckon(pool)

    def _reckon(self, pool: int) -> None:
        """Notes when the pool's next task ends, after its threads have changed. If that is later
        than before, the look that is already planned finds out."""
        self._next_end[pool] = end = self._pools[pool].next_end()
        if end < self._looks[pool]:
            self._looks[pool] = end
            self._at(end, self._look, pool)

    def _look(self, now: float, pool: int) -> None:
        if now != self._looks[pool]:
            return  # an earlier look was planned since
        self._looks[pool] = _NEVER
        if now == self._next_end[pool]:
            self._done(now, self._pools[pool].pop(now))
        self._reckon(pool)

    def _done(self, now: float, task: int) -> None:
        """Ends a task's work and begins its pause."""
        if self._pause[task] > 0:
            self._at(now + self._pause[task], self._leave, task)
        else:
            self._leave(now, task)

    def _leave(self, now: float, task: int) -> None:
        self.end[task] = now
        for edge in range(self._first_target[task], self._first_target[task + 1]):
            target, arrival = self._targets[edge], now + self._latency[edge]
            if arrival > self._ready[target]:
                self._ready[target] = arrival
            self._missing[target] -= 1
            if self._missing[target] == 0:
                ready = self._ready[target]
                if ready > now:
                    self._at(ready, self._arrive, target)
                else:
                    self._now.append((self._arrive, target))
        following = self._next_on_thread[task]
        if following != NO_TASK:
            self._now.append((self._take_turn, following))


def _next_on_thread(graph: TaskGraph) -> Tasks:
    following = np.full(len(graph), NO_TASK)
    tasks = np.flatnonzero(graph.before != NO_TASK)
    following[graph.before[tasks]] = tasks
    return following

"""The tasks of the threads of all ranks, their order, and what each waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Tasks = npt.NDArray[np.intp]
"""Numbers of tasks."""

NO_TASK = -1
NO_THREAD = -1


class After(NamedTuple):
    """The tasks that tasks wait for, beside the one before on the same thread.

    Attributes:
        tasks: numbers of the tasks waited for, one for each task that waits.
        latency: microseconds from their ends, one for all or one for each.
    """

    tasks: Tasks
    latency: float | Floats = 0.0


@dataclass(frozen=True)
class Machine:
    """The cores that threads run on.

    Attributes:
        cores: number of cores of each pool. A pool is a host, or the cores that a rank is pinned
            to.
        pool: (threads,), pool of each thread.
        spin_us: time for which a waiting thread keeps its core before it sleeps.
        wake_us: time that a sleeping thread needs to run again after its wait has ended.
        links: number of pools, the last ones, that are links and have no cores. A task on a link is
            bytes that pass; its thread neither spins nor sleeps.
        threads: rank and name of each thread, for people; may be empty.
    """

    cores: tuple[int, ...]
    pool: Tasks
    spin_us: float = 0.0
    wake_us: float = 0.0
    links: int = 0
    threads: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for an impossible machine."""
        if not self.cores or min(self.cores) < 1:
            raise ValueError(f"cores are {self.cores}: every pool needs one at least")
        if len(self.pool) == 0 or not (self.pool.min() >= 0 and self.pool.max() < len(self.cores)):
            raise ValueError(f"threads are in pools {self.pool}, of {len(self.cores)}")
        for name, value in (("spin_us", self.spin_us), ("wake_us", self.wake_us)):
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}, but must not be negative")

    @cached_property
    def sleeps(self) -> npt.NDArray[np.bool_]:
        """Returns (threads,), whether a thread spins and then sleeps when it waits."""
        on_cores: npt.NDArray[np.bool_] = self.pool < len(self.cores) - self.links
        return on_cores

    @property
    def is_shared(self) -> bool:
        """Returns whether any pool has more threads than cores."""
        threads = np.bincount(self.pool, minlength=len(self.cores))
        return bool((threads > np.array(self.cores)).any())


@dataclass(frozen=True)
class TaskGraph:
    """Tasks in an order in which each comes after all tasks that it waits for.

    Attributes:
        machine: machine that the tasks run on.
        names: names of tasks.
        name: (tasks,), index in `names`.
        step: (tasks,), step of the job.
        thread: (tasks,), the thread; NO_THREAD for tasks without one, like the last of several
            arrivals.
        work: (tasks,), microseconds on a core of the task's own.
        pause: (tasks,), microseconds on no core after the work; the thread is not free meanwhile.
        before: (tasks,), task before it on its thread, or NO_TASK.
        first_edge: (tasks + 1,), number of each task's first edge.
        source: (edges,), tasks that are waited for.
        latency: (edges,), microseconds from their ends.
        level: (tasks,), a number above the levels of all tasks that it waits for.
    """

    machine: Machine
    names: tuple[str, ...]
    name: npt.NDArray[np.intp]
    step: npt.NDArray[np.intp]
    thread: npt.NDArray[np.intp]
    work: Floats
    pause: Floats
    before: Tasks
    first_edge: npt.NDArray[np.intp]
    source: Tasks
    latency: Floats
    level: npt.NDArray[np.intp]

    def __len__(self) -> int:
        """Returns the number of tasks."""
        return len(self.work)

    def called(self, name: str) -> Tasks:
        """Returns the tasks with a name, in their order; none if the name is unknown."""
        if name not in self.names:
            return np.empty(0, np.intp)
        return np.flatnonzero(self.name == self.names.index(name))

    @cached_property
    def targets(self) -> Tasks:
        """Returns (edges,), the task that waits."""
        return np.repeat(np.arange(len(self)), np.diff(self.first_edge))


class GraphBuilder:
    """Adds tasks, one at a time or one to each of several threads.

    Args:
        machine: machine that the tasks run on.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._names: dict[str, int] = {}
        self._rows: list[tuple[npt.NDArray[Any], ...]] = []
        self._edges: list[tuple[Tasks, Tasks, Floats]] = []
        self._last = np.full(len(machine.pool), NO_TASK)
        self._level = np.zeros(1024, np.intp)
        self._count = 0

    def add(
        self,
        name: str,
        threads: npt.ArrayLike,
        work: npt.ArrayLike = 0.0,
        *,
        pause: npt.ArrayLike = 0.0,
        after: Sequence[After] = (),
        step: int = 0,
    ) -> Tasks:
        """Adds one task at the end of each of `threads`, and returns the tasks' numbers.

        Args:
            name: name of all these tasks.
            threads: threads, each once.
            work: microseconds on a core, one for all or one for each.
            pause: microseconds on no core after the work, one for all or one for each.
            after: what each task waits for.
            step: step of the job that the tasks are part of.

        Raises:
            ValueError: a duration is negative or not finite, or a thread does not exist or is named
                twice.
        """
        on = np.atleast_1d(np.asarray(threads, np.intp))
        if len(np.unique(on)) < len(on) or on.min() < 0 or on.max() >= len(self._last):
            raise ValueError(f"'{name}' is for threads {on}, of {len(self._last)}")
        tasks = self._append(name, on, work, pause, self._last[on], after, step)
        self._last[on] = tasks
        return tasks

    def join(self, name: str, of: Sequence[After], *, step: int = 0) -> Tasks:
        """Adds a task that takes no time. It is done when all of `of` are, each with its
        latency."""
        sources = np.concatenate([np.atleast_1d(each.tasks) for each in of])
        latency = np.concatenate(
            [np.broadcast_to(each.latency, np.shape(each.tasks)).ravel() for each in of]
        )
        nothing = np.full(1, NO_TASK)
        task = self._append(name, np.full(1, NO_THREAD), 0.0, 0.0, nothing, (), step)
        self._wait(np.repeat(task, len(sources)), sources, latency)
        return task

    def build(self) -> TaskGraph:
        """Returns the graph of all tasks added so far."""
        columns = [np.concatenate(column) for column in zip(*self._rows, strict=True)]
        name, step, thread, work, pause, before = columns
        none = np.empty(0, np.intp)
        edges = [(none, none, np.empty(0)), *self._edges]
        target, source, latency = (np.concatenate(column) for column in zip(*edges, strict=True))
        by_target = np.argsort(target, kind="stable")
        counts = np.bincount(target, minlength=self._count)
        return TaskGraph(
            machine=self._machine,
            names=tuple(self._names),
            name=name.astype(np.intp),
            step=step.astype(np.intp),
            thread=thread.astype(np.intp),
            work=work.astype(np.float64),
            pause=pause.astype(np.float64),
            before=before.astype(np.intp),
            first_edge=np.concatenate([[0], np.cumsum(counts)]),
            source=source[by_target],
            latency=latency[by_target],
            level=self._level[: self._count].copy(),
        )

    def _append(
        self,
        name: str,
        threads: npt.NDArray[np.intp],
        work: npt.ArrayLike,
        pause: npt.ArrayLike,
        before: Tasks,
        after: Sequence[After],
        step: int,
    ) -> Tasks:
        shape = threads.shape
        durations = [np.broadcast_to(np.asarray(each, float), shape) for each in (work, pause)]
        for duration in durations:
            if not (np.isfinite(duration).all() and (duration >= 0).all()):
                raise ValueError(f"'{name}' takes {duration} us: must be finite and not negative")
        tasks = self._count + np.arange(len(threads))
        self._count += len(threads)
        if self._count > len(self._level):
            self._level = np.concatenate(
                [self._level, np.zeros(max(self._count, len(self._level)), np.intp)]
            )
        number = self._names.setdefault(name, len(self._names))
        constant = np.full(shape, number), np.full(shape, step)
        self._rows.append((*constant, threads, *durations, before))
        has_before = before != NO_TASK
        self._level[tasks[has_before]] = self._level[before[has_before]] + 1
        for each in after:
            self._wait(tasks, np.broadcast_to(each.tasks, shape), each.latency)
        return tasks

    def _wait(self, tasks: Tasks, sources: Tasks, latency: float | Floats) -> None:
        late = np.broadcast_to(np.asarray(latency, float), tasks.shape)
        if not (np.isfinite(late).all() and (late >= 0).all()):
            raise ValueError(f"latencies are {late} us: must be finite and not negative")
        if (sources >= tasks).any() or (sources < 0).any():
            raise ValueError("a task waits for one that is not there yet")
        self._edges.append((tasks, sources, late))
        np.maximum.at(self._level, tasks, self._level[sources] + 1)

"""The reasons why a simulation ended when it did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .task_graph import NO_TASK, NO_THREAD, Tasks
from .timeline import Timeline


@dataclass(frozen=True)
class Cause:
    """Microseconds of a task on the critical path, from when it could have begun.

    Attributes:
        work: time on a core of its own.
        sharing: further time, since other threads ran on the same cores.
        pause: time on no core.
        arrival: latency of what it waited for, and time to wake up.
    """

    work: float = 0.0
    sharing: float = 0.0
    pause: float = 0.0
    arrival: float = 0.0

    @property
    def total(self) -> float:
        """Returns the sum of all parts."""
        return self.work + self.sharing + self.pause + self.arrival

    def __add__(self, other: Cause) -> Cause:
        """Adds each part."""
        return Cause(
            self.work + other.work,
            self.sharing + other.sharing,
            self.pause + other.pause,
            self.arrival + other.arrival,
        )


def critical_path(timeline: Timeline) -> Tasks:
    """Returns tasks in order, the last of which ended last. Each made the next one begin.

    Bytes on a link are not the last: they count where somebody waits for them.
    """
    graph = timeline.graph
    counts = (graph.thread == NO_THREAD) | graph.machine.sleeps[graph.thread]
    path = [int(np.where(counts, timeline.end, -np.inf).argmax())]
    while (before := what_let_it_begin(timeline, path[-1])) != NO_TASK:
        path.append(before)
    return np.array(path[::-1], np.intp)


def what_let_it_begin(timeline: Timeline, task: int) -> int:
    """Returns the task whose end a task waited for last, or NO_TASK if it waited for none."""
    graph = timeline.graph
    before = int(graph.before[task])
    edges = slice(graph.first_edge[task], graph.first_edge[task + 1])
    sources = graph.source[edges]
    if not len(sources):
        return before
    arrivals = timeline.end[sources] + graph.latency[edges]
    last = int(arrivals.argmax())
    if before != NO_TASK and timeline.end[before] >= arrivals[last]:
        return before
    return int(sources[last])


def causes(timeline: Timeline) -> Mapping[tuple[int, str], Cause]:
    """Returns the parts of the critical path by thread and task's name, the largest first.

    The causes add up to the end of the simulation.
    """
    graph = timeline.graph
    found: defaultdict[tuple[int, str], Cause] = defaultdict(Cause)
    until = 0.0
    arrival = 0.0
    for task in critical_path(timeline).tolist():
        start, end = float(timeline.start[task]), float(timeline.end[task])
        work, pause = float(graph.work[task]), float(graph.pause[task])
        arrival += start - until
        until = end
        thread = int(graph.thread[task])
        if thread == NO_THREAD:
            continue  # the task after it waited for it
        key = thread, graph.names[graph.name[task]]
        sharing = max(0.0, end - start - work - pause)
        found[key] += Cause(work, sharing, pause, arrival)
        arrival = 0.0
    found[key] += Cause(arrival=arrival)  # of the last arrival
    return dict(sorted(found.items(), key=lambda item: -item[1].total))

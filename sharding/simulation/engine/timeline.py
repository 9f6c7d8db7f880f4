"""When tasks begin and end."""

from __future__ import annotations

from dataclasses import dataclass

from .recurrence import run_alone
from .shared_cores import run_shared
from .task_graph import Floats, TaskGraph


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation.

    Attributes:
        graph: graph of the tasks.
        start: (tasks,), microseconds.
        end: (tasks,), microseconds; with the pause.
    """

    graph: TaskGraph
    start: Floats
    end: Floats


def simulate(graph: TaskGraph) -> Timeline:
    """Returns when all tasks run, at the earliest.

    Where threads outnumber the cores of a pool, n that run there have cores / n each.
    """
    run = run_shared if graph.machine.is_shared else run_alone
    start, end = run(graph)
    return Timeline(graph, start, end)

"""The times at which tasks begin and end."""

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
        start: (tasks,), begin of each task, microseconds.
        end: (tasks,), end of each task with its pause, microseconds.
    """

    graph: TaskGraph
    start: Floats
    end: Floats


def simulate(graph: TaskGraph) -> Timeline:
    """Returns the earliest times at which all tasks run.

    If n threads run in a pool with fewer cores, each has cores / n of a core.
    """
    run = run_shared if graph.machine.is_shared else run_alone
    start, end = run(graph)
    return Timeline(graph, start, end)

"""Runs tasks of threads that have a core each: a task begins at the end of its longest path."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from .task_graph import NO_TASK, NO_THREAD, Floats, TaskGraph, Tasks


def run_alone(graph: TaskGraph) -> tuple[Floats, Floats]:
    """Returns start and end of each task, microseconds, as if every thread had its own core."""
    machine = graph.machine
    start, end = np.zeros(len(graph)), np.zeros(len(graph))
    by_level = np.argsort(graph.level, kind="stable")
    bounds = np.searchsorted(graph.level[by_level], np.arange(graph.level.max(initial=-1) + 2))
    edges = np.diff(graph.first_edge)
    for first, last in pairwise(bounds):
        tasks = by_level[first:last]
        before = graph.before[tasks]
        free = np.where(before == NO_TASK, 0.0, end[before])
        start[tasks] = free
        waits = edges[tasks] > 0
        if waits.any():
            waiting, free = tasks[waits], free[waits]
            ready = _last_arrival(graph, waiting, edges[waiting], end)
            thread = graph.thread[waiting]
            slept = (ready - free > machine.spin_us) & (thread != NO_THREAD)
            slept &= machine.sleeps[thread]
            start[waiting] = np.maximum(free, ready + np.where(slept, machine.wake_us, 0.0))
        end[tasks] = start[tasks] + graph.work[tasks] + graph.pause[tasks]
    return start, end


def _last_arrival(graph: TaskGraph, tasks: Tasks, counts: Tasks, end: Floats) -> Floats:
    """Returns the time of each task's last arrival. `counts` are the numbers of their edges."""
    first = np.cumsum(counts) - counts
    edges = np.repeat(graph.first_edge[tasks] - first, counts) + np.arange(counts.sum())
    arrivals = end[graph.source[edges]] + graph.latency[edges]
    return np.maximum.reduceat(arrivals, first)

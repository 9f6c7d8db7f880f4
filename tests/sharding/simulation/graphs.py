"""Random task graphs, and a simulation of theirs that is as simple as it is slow."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from torchrec_bls.sharding.simulation.engine.task_graph import (
    NO_TASK,
    NO_THREAD,
    After,
    GraphBuilder,
    Machine,
    TaskGraph,
)


@st.composite
def graphs(draw: Any, *, shared: bool) -> TaskGraph:
    """Draws graphs; where not `shared`, each thread has a core."""
    # Times are multiples of 2^-3, so that sums in any order are the same.
    times = st.integers(0, 80).map(lambda eighths: eighths / 8)
    threads = draw(st.integers(1, 5))
    pools = draw(st.integers(1, 2))
    pool = np.array(draw(st.lists(st.integers(0, pools - 1), min_size=threads, max_size=threads)))
    per_pool = np.bincount(pool, minlength=pools)
    cores = tuple(
        draw(st.integers(1, 3)) if shared else max(1, int(threads)) for threads in per_pool
    )
    links = draw(st.integers(0, pools - 1))
    machine = Machine(cores, pool, spin_us=draw(times), wake_us=draw(times), links=links)
    builder = GraphBuilder(machine)
    for count in range(draw(st.integers(1, 14))):
        sources = draw(st.lists(st.integers(0, count - 1), max_size=2)) if count else []
        after = [After(np.array([source]), draw(times)) for source in sources]
        if after and draw(st.integers(0, 4)) == 0:
            builder.join("join", after)
        else:
            thread = draw(st.integers(0, threads - 1))
            builder.add("task", [thread], draw(times), pause=draw(times), after=after)
    return builder.build()


def simulate_slowly(graph: TaskGraph) -> tuple[np.ndarray, np.ndarray]:
    """Returns start and end of tasks: looks at everything again whenever anything changes."""
    machine = graph.machine
    tasks = range(len(graph))
    start: dict[int, float] = {}
    end: dict[int, float] = {}
    left = graph.work.astype(float).tolist()
    worked: dict[int, float] = {}  # when its work was done
    on_link = [machine.pool[t] >= len(machine.cores) - machine.links for t in graph.thread]

    def arrival(task: int) -> float | None:
        edges = range(graph.first_edge[task], graph.first_edge[task + 1])
        if any(int(graph.source[edge]) not in end for edge in edges):
            return None
        return max((end[int(graph.source[e])] + graph.latency[e] for e in edges), default=-np.inf)

    def turn(task: int) -> float | None:
        before = int(graph.before[task])
        return 0.0 if before == NO_TASK else end.get(before)

    def begin(task: int) -> float | None:
        ready, free = arrival(task), turn(task)
        if ready is None or free is None:
            return None
        slept = ready - free > machine.spin_us and graph.thread[task] != NO_THREAD
        slept = slept and not on_link[task]
        return max(free, ready + (machine.wake_us if slept else 0.0))

    now = 0.0
    while len(end) < len(graph):
        for _ in tasks:  # as many rounds as one instant can have
            for task in tasks:
                when = begin(task)
                if task not in start and when is not None and when <= now + 1e-9:
                    start[task] = when
                if task in start and task not in worked and left[task] <= 1e-9:
                    worked[task] = now
                if (
                    task in worked
                    and task not in end
                    and worked[task] + graph.pause[task] <= now + 1e-9
                ):
                    end[task] = worked[task] + graph.pause[task]
        running = [task for task in tasks if task in start and task not in worked]
        changes = []
        busy = np.zeros(len(machine.cores))
        for task in running:
            busy[machine.pool[graph.thread[task]]] += 1
        for task in tasks:
            free, ready = turn(task), arrival(task)
            if task in worked or task in running or graph.thread[task] == NO_THREAD or free is None:
                continue
            if ready is None or ready > now + 1e-9:
                if now < free + machine.spin_us - 1e-9 and not on_link[task]:
                    busy[machine.pool[graph.thread[task]]] += 1
                changes.append(free + machine.spin_us)
        rate = dict.fromkeys(running, 1.0)
        for task in running:
            pool = machine.pool[graph.thread[task]]
            rate[task] = min(1.0, machine.cores[pool] / busy[pool])
            changes.append(now + left[task] / rate[task])
        changes += [worked[task] + graph.pause[task] for task in worked]
        changes += [when for task in tasks if (when := begin(task)) is not None]
        changes += [when for task in tasks if (when := arrival(task)) is not None]
        following = min((when for when in changes if when > now + 1e-9), default=None)
        if following is None:
            continue
        for task in running:
            left[task] = max(0.0, left[task] - (following - now) * rate[task])
        now = following
    return np.array([start[task] for task in tasks]), np.array([end[task] for task in tasks])

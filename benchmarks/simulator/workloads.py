"""What the threads of simulated steps do: shares of a step (Figure 2) and a timeline (Figure 5)."""

from collections import defaultdict
from typing import Any

import numpy as np
from torchrec_bls.sharding.costs.profiled import ProfiledCosts
from torchrec_bls.sharding.simulation.engine.timeline import Timeline
from torchrec_bls.sharding.simulation.one_step import one_step

from benchmarks.simulator.scores import Predicted

LOOKUPS, EXCHANGES, HOST, IDLE = "lookups", "exchanges", "other work", "idle"
_STAGES = {"lookup": LOOKUPS, "load": HOST, "inputs": HOST, "outputs": HOST}


def heavy_and_light(kind: Predicted, costs: ProfiledCosts) -> dict[str, Any]:
    """The models whose steps have the greatest and the least share of lookups, under our planner's
    first plan: microseconds of rank 0's threads by what they do, and of the light one, where it
    trains and ranks have communication threads, the timeline."""
    first = [i for i, name in enumerate(kind.names) if name.startswith("ours 1")]
    plans = [kind.measured[i] for i in first]
    lines = [one_step(p.plan, p.workload, p.job, costs, kind.host) for p in plans]
    shares = [_threads(line) for line in lines]
    of_lookups = [each["main"][LOOKUPS] / sum(each["main"].values()) for each in shares]
    heavy, light = int(np.argmax(of_lookups)), int(np.argmin(of_lookups))
    found: dict[str, Any] = {"shares": {"heavy": shares[heavy], "light": shares[light]}}
    if len(shares[light]) > 1 and plans[light].job.training:
        found["timeline"] = _tasks(lines[light])
    return found


def _category(name: str) -> str:
    return _STAGES.get(name.split()[0], EXCHANGES)


def _threads(line: Timeline) -> dict[str, dict[str, float]]:
    graph, end = line.graph, float(line.end.max())
    threads = len(graph.machine.pool)
    ranks = threads // 2 if "all begin" in graph.names else threads
    found = {}
    for name, thread in zip(("main", "communication"), range(0, threads, ranks), strict=False):
        of_thread: dict[str, float] = defaultdict(float)
        for task in np.flatnonzero(graph.thread == thread):
            busy = float(line.end[task] - line.start[task])
            of_thread[_category(graph.names[graph.name[task]])] += busy
        of_thread[IDLE] = end - sum(of_thread.values())
        found[name] = {each: of_thread[each] for each in (LOOKUPS, EXCHANGES, HOST, IDLE)}
    return found


def _tasks(line: Timeline) -> list[tuple[int, str, float, float]]:
    """Thread, category, start and end of what takes any time."""
    graph = line.graph
    return [
        (int(graph.thread[i]), _category(graph.names[graph.name[i]]), line.start[i], line.end[i])
        for i in np.flatnonzero((graph.thread >= 0) & (line.end > line.start))
    ]

"""What the end of a simulation is due to."""

import networkx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from torchrec_bls.sharding.simulation.engine.critical_path import Cause, causes, critical_path
from torchrec_bls.sharding.simulation.engine.task_graph import (
    NO_TASK,
    NO_THREAD,
    After,
    GraphBuilder,
    Machine,
    TaskGraph,
)
from torchrec_bls.sharding.simulation.engine.timeline import simulate

from tests.sharding.simulation.graphs import graphs


@settings(deadline=None, max_examples=100)
@given(graphs(shared=True))
def test_causes_add_up_to_the_end(graph: TaskGraph) -> None:
    timeline = simulate(graph)
    total = sum(cause.total for cause in causes(timeline).values())
    # Bytes that nobody waits for end nothing.
    ends = [
        end
        for end, thread in zip(timeline.end.tolist(), graph.thread.tolist(), strict=True)
        if thread == NO_THREAD or graph.machine.sleeps[thread]
    ]
    assume(ends)
    assert total == pytest.approx(max(ends), abs=1e-6)


@settings(deadline=None, max_examples=100)
@given(graphs(shared=True))
def test_each_task_of_the_path_waits_for_the_one_before_it(graph: TaskGraph) -> None:
    path = critical_path(simulate(graph)).tolist()
    waits: networkx.DiGraph = networkx.DiGraph()
    waits.add_nodes_from(range(len(graph)))
    for task in range(len(graph)):
        edges = slice(graph.first_edge[task], graph.first_edge[task + 1])
        waits.add_edges_from((int(source), task) for source in graph.source[edges])
        if graph.before[task] != NO_TASK:
            waits.add_edge(int(graph.before[task]), task)
    assert networkx.is_path(waits, path) or len(path) == 1


def test_by_hand() -> None:
    machine = Machine((1, 1), np.array([0, 1, 1]), wake_us=1.0)
    builder = GraphBuilder(machine)
    post = builder.add("post", [1], 10.0)
    builder.add("else", [2], 4.0)
    arrived = builder.join("arrived", [After(post, 2.0)])
    builder.add("collect", [0], 5.0, pause=3.0, after=[After(arrived)])
    # Both of the second pool run at half speed until 8; post ends at 14, arrives at 16; the other
    # thread wakes up at 17 and is done at 25.
    timeline = simulate(builder.build())
    assert timeline.end.max() == 25.0
    assert causes(timeline) == {
        (1, "post"): Cause(work=10.0, sharing=4.0),
        (0, "collect"): Cause(work=5.0, pause=3.0, arrival=3.0),
    }

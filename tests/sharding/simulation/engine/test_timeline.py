"""Both ways of running a task graph, beside simulations that know nothing of them."""

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec_bls.sharding.simulation.engine.recurrence import run_alone
from torchrec_bls.sharding.simulation.engine.shared_cores import run_shared
from torchrec_bls.sharding.simulation.engine.task_graph import (
    NO_TASK,
    NO_THREAD,
    After,
    GraphBuilder,
    Machine,
    TaskGraph,
)
from torchrec_bls.sharding.simulation.engine.timeline import simulate

from tests.sharding.simulation.graphs import graphs, simulate_slowly

_FOUR_ALONE = Machine((4,), np.zeros(4, np.intp))


@settings(deadline=None, max_examples=200)
@given(graphs(shared=False))
def test_with_a_core_each_both_ways_are_equal(graph: TaskGraph) -> None:
    alone, shared = run_alone(graph), run_shared(graph)
    np.testing.assert_allclose(alone[0], shared[0], atol=1e-6)
    np.testing.assert_allclose(alone[1], shared[1], atol=1e-6)


@settings(deadline=None, max_examples=200)
@given(graphs(shared=True))
def test_shared_cores_are_those_of_the_slow_simulation(graph: TaskGraph) -> None:
    start, end = run_shared(graph)
    slow_start, slow_end = simulate_slowly(graph)
    np.testing.assert_allclose(start, slow_start, atol=1e-6)
    np.testing.assert_allclose(end, slow_end, atol=1e-6)


@settings(deadline=None, max_examples=100)
@given(graphs(shared=True))
def test_nobody_uses_more_than_there_is(graph: TaskGraph) -> None:
    """Between any two moments tasks get no more work done than the cores could do."""
    start, end = run_shared(graph)
    for pool, cores in enumerate(graph.machine.cores):
        of_pool = (graph.thread != NO_THREAD) & (
            graph.machine.pool[np.maximum(graph.thread, 0)] == pool
        )
        done = end - graph.pause
        for first in start[of_pool]:
            for last in done[of_pool]:
                inside = of_pool & (start >= first) & (done <= last)
                assert graph.work[inside].sum() <= cores * (last - first) + 1e-6 or last < first


@settings(deadline=None, max_examples=100)
@given(graphs(shared=True), st.integers(1, 3))
def test_cores_that_are_needed_are_used(graph: TaskGraph, cores: int) -> None:
    """Graham's bound: at any time all cores are busy, or the longest way gets shorter."""
    pool = np.zeros_like(graph.machine.pool)
    machines = {count: Machine((count,), pool) for count in (cores, len(pool))}
    ends = {
        count: run_shared(TaskGraph(**{**vars(graph), "machine": machine}))[1].max()
        for count, machine in machines.items()
    }
    longest = ends[len(pool)]
    assert ends[cores] <= graph.work.sum() / cores + longest + 1e-6


@settings(deadline=None, max_examples=100)
@given(graphs(shared=False))
def test_the_end_is_networkx_longest_path(graph: TaskGraph) -> None:
    ways: networkx.DiGraph = networkx.DiGraph()
    waiting_costs_nothing = Machine(graph.machine.cores, graph.machine.pool, spin_us=1e9)
    for task in range(len(graph)):
        takes = float(graph.work[task] + graph.pause[task])
        ways.add_edge("begin", task, weight=takes)
        before = int(graph.before[task])
        if before != NO_TASK:
            ways.add_edge(before, task, weight=takes)
        for edge in range(graph.first_edge[task], graph.first_edge[task + 1]):
            source, weight = int(graph.source[edge]), float(graph.latency[edge]) + takes
            known = ways.get_edge_data(source, task, {"weight": 0.0})["weight"]
            ways.add_edge(source, task, weight=max(weight, known))
    quick = TaskGraph(**{**vars(graph), "machine": waiting_costs_nothing})
    _, end = run_alone(quick)
    assert end.max() == pytest.approx(networkx.dag_longest_path_length(ways))


def test_two_on_one_core_take_twice_as_long() -> None:
    builder = GraphBuilder(Machine((1,), np.zeros(2, np.intp)))
    builder.add("work", [0, 1], [10.0, 30.0])
    timeline = simulate(builder.build())
    # Both at half speed until the short one is done at 20, then the other alone.
    assert timeline.end.tolist() == [20.0, 40.0]


def test_pauses_take_no_core() -> None:
    builder = GraphBuilder(Machine((1,), np.zeros(2, np.intp)))
    builder.add("delay", [0], pause=10.0)
    builder.add("work", [0, 1], 10.0)
    assert simulate(builder.build()).end.tolist() == [10.0, 20.0, 10.0]


def test_a_waiting_thread_keeps_its_core_and_then_sleeps() -> None:
    machine = Machine((1,), np.zeros(2, np.intp), spin_us=4.0, wake_us=3.0)
    builder = GraphBuilder(machine)
    long = builder.add("long", [0], 10.0)
    builder.add("after it", [1], 1.0, after=[After(long)])
    # Spins at half of the core until 4, by when `long` has done 2 of 10: it ends at 12.
    assert simulate(builder.build()).end.tolist() == [12.0, 16.0]


def test_the_last_arrival_counts() -> None:
    builder = GraphBuilder(_FOUR_ALONE)
    posted = builder.add("post", range(4), [1.0, 5.0, 2.0, 3.0])
    everybody = builder.join("arrived", [After(posted, latency=np.array([0.0, 0.0, 7.0, 0.0]))])
    done = builder.add("collect", range(4), 1.0, after=[After(everybody)])
    assert simulate(builder.build()).end[done].tolist() == [10.0] * 4


@pytest.mark.parametrize(
    ("work", "pause"), [(-1.0, 0.0), (0.0, -1.0), (float("nan"), 0.0), (0.0, float("inf"))]
)
def test_impossible_durations_are_refused(work: float, pause: float) -> None:
    with pytest.raises(ValueError, match=r"'work' takes .* must be finite and not negative"):
        GraphBuilder(_FOUR_ALONE).add("work", [0], work, pause=pause)


def test_nobody_waits_for_what_comes_later() -> None:
    builder = GraphBuilder(_FOUR_ALONE)
    with pytest.raises(ValueError, match="not there yet"):
        builder.add("work", [0], after=[After(np.array([0]))])


@pytest.mark.parametrize("latency", [-1.0, float("nan")])
def test_impossible_latencies_are_refused(latency: float) -> None:
    builder = GraphBuilder(_FOUR_ALONE)
    first = builder.add("work", [0])
    with pytest.raises(ValueError, match="latencies are"):
        builder.add("work", [1], after=[After(first, latency)])


@pytest.mark.parametrize("threads", [[4], [-1], [1, 1]])
def test_threads_that_are_not_there_are_refused(threads: list[int]) -> None:
    with pytest.raises(ValueError, match="'work' is for threads"):
        GraphBuilder(_FOUR_ALONE).add("work", threads)


@pytest.mark.parametrize(
    ("cores", "pool", "spin_us", "message"),
    [
        ((0,), [0], 0.0, "every pool needs one"),
        ((), [0], 0.0, "every pool needs one"),
        ((1,), [1], 0.0, "threads are in pools"),
        ((1,), [], 0.0, "threads are in pools"),
        ((1,), [0], -1.0, "spin_us is -1.0"),
        ((1,), [0], float("nan"), "spin_us is nan"),
    ],
)
def test_impossible_machines_are_refused(
    cores: tuple[int, ...], pool: list[int], spin_us: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Machine(cores, np.array(pool, np.intp), spin_us)

"""Steps under DistributedDataParallel: overlaps by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec_bls.sharding.problem.options import make_problem
from torchrec_bls.sharding.search.search import search
from torchrec_bls.sharding.simulation.data_parallel import Bucket, DenseSteps
from torchrec_bls.sharding.simulation.engine.timeline import simulate
from torchrec_bls.sharding.simulation.plan_steps import program_of
from torchrec_bls.sharding.simulation.program import Ranks, graph_of

from benchmarks.simulator.dense.steps import data_parallel_program
from tests.sharding.additive_costs import AdditiveTestCosts, random_workload, roomy
from torchrec_bls.rank_steps import Work

COSTS = AdditiveTestCosts()


def _steps() -> DenseSteps:
    return DenseSteps(
        forward_us=16.0,
        buckets=(Bucket(7.0, 50.0, 2.0), Bucket(25.0, 60.0, 4.0)),
        optimizer_us=8.0,
    )


def _end(dense: DenseSteps, ranks: Ranks, names: tuple[str, ...] = ()) -> Any:
    timeline = simulate(graph_of(data_parallel_program(dense, step_us=1.0), ranks, 1))
    ends = [timeline.end[timeline.graph.called(name)].max() for name in names]
    return [*ends, timeline.end.max()]


def test_overlap_by_hand_with_a_core_for_each_thread() -> None:
    # Forward until 17, the first bucket begins at 24 and is done at 74; the second is full at 49,
    # but begins when the first is done: 134. Then unpacking, 4, and the optimizer, 8.
    names = ("dense gradients 0", "dense backward", "dense gradients 1")
    alone = Ranks.on_hosts(2, per_host=2, cores=4)
    assert _end(_steps(), alone, names) == pytest.approx([74.0, 49.0, 134.0, 146.0])


def test_overlap_by_hand_on_a_core_for_each_rank() -> None:
    # From 24 to 74 backward and communication have half of the core each: 25 us of the former.
    # The first bucket has 25 us left then: until 99, the second one until 159.
    pinned = Ranks(2, cores=(1, 1), pool=(0, 1))
    names = ("dense backward", "dense gradients 0", "dense gradients 1")
    # The first bucket's unpacking, 2, shares the core with the second all-reduce: from 99 on
    # until 103, so that the latter ends 2 later.
    assert _end(_steps(), pinned, names) == pytest.approx([74.0, 99.0, 161.0, 173.0])


def test_late_ranks_hold_up_all_reduces_but_not_the_backward() -> None:
    late = replace(_steps(), buckets=tuple(replace(each, work_us=0.0) for each in _steps().buckets))
    program = data_parallel_program(late)
    program[0] = Work([0.0, 100.0], "load")
    timeline = simulate(graph_of(program, Ranks.on_hosts(2, 2, 4), 1))
    backward = timeline.end[timeline.graph.called("dense backward")].reshape(-1, 2)
    assert backward.tolist() == [[16.0, 116.0], [16.0, 116.0]]
    done = timeline.end[timeline.graph.called("dense gradients 0")]
    assert done.tolist() == [166.0, 166.0]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 100), st.integers(0, 9)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 4),
)
def test_with_free_cores_steps_are_the_longest_of_two_chains(
    buckets: list[tuple[int, int, int]], ranks: int
) -> None:
    dense = DenseSteps(7.0, tuple(Bucket(*map(float, each)) for each in buckets), 3.0, 5.0)
    done, reduced, unpacked = 8.0, 0.0, []
    for bucket in dense.buckets:
        done += bucket.work_us
        reduced = max(reduced, done) + bucket.all_reduce_us
        unpacked.append((reduced, bucket.unpack_us))
    end = done + 3.0
    for arrived, unpack in unpacked:
        end = max(end, arrived) + unpack
    free = Ranks.on_hosts(ranks, ranks, 2 * ranks)
    assert _end(dense, free)[-1] == pytest.approx(end + 5.0)


def _plan_step(dense: DenseSteps | None, **others: Any) -> Any:
    workload, job = random_workload(3, 6, modules=2), roomy(4, **others)
    plan = search(make_problem(workload, job, COSTS)).plan
    program = program_of(plan, workload, job, COSTS, dense=dense)
    return simulate(graph_of(program, Ranks.on_hosts(4, 4, 8), 6))


def _step_us(timeline: Any) -> float:
    loads = timeline.start[timeline.graph.called("load")].reshape(6, 4).max(axis=1)
    return float(np.diff(loads)[-1])


def test_dense_layers_of_plans() -> None:
    without = _step_us(_plan_step(None))
    one = DenseSteps(20.0, (Bucket(30.0, 1.0, 2.0),), 3.0, 4.0)
    # An all-reduce of 1 us is over before the lookups' backward is.
    assert _step_us(_plan_step(one)) == pytest.approx(without + 20 + 30 + 3 + 2 + 4)
    # One of 100 ms is not: it begins when the backward of the dense layers has filled the bucket.
    long = replace(one, buckets=(Bucket(30.0, 1e5, 2.0),), rest_us=0.0)
    timeline = _plan_step(long)
    begun = timeline.end[timeline.graph.called("dense backward")].reshape(6, -1)[-1].max()
    assert timeline.end.max() - begun == pytest.approx(1e5 + 2 + 4)


def test_dense_layers_of_inference_have_a_forward_only() -> None:
    dense = DenseSteps(20.0, (Bucket(30.0, 1e5, 2.0),), 3.0, 4.0)
    inference = _step_us(_plan_step(dense, training=False))
    assert inference == pytest.approx(_step_us(_plan_step(None, training=False)) + 20.0)

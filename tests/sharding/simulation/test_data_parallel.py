"""Steps under DistributedDataParallel: torch's own buckets, and overlaps by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec_bls.sharding.cost_interface import Gradient, LayerTimes
from torchrec_bls.sharding.costs.dense.layers import dense_ops
from torchrec_bls.sharding.problem.options import make_problem
from torchrec_bls.sharding.search.search import search
from torchrec_bls.sharding.simulation.data_parallel import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Bucket,
    DenseSteps,
    buckets_of,
    data_parallel_program,
)
from torchrec_bls.sharding.simulation.engine.timeline import simulate
from torchrec_bls.sharding.simulation.plan_steps import program_of
from torchrec_bls.sharding.simulation.program import Ranks, graph_of

from tests.processes import run
from tests.sharding.additive_costs import AdditiveTestCosts, random_workload, roomy
from torchrec_bls.rank_steps import Work

COSTS = AdditiveTestCosts()
COSTS.all_reduce_us = 30.0  # and 2 for 1,000 bytes


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 200), st.integers(1, 200)
)
def test_buckets_are_those_of_torch(elements: list[int], first: int, others: int) -> None:
    ready = list(range(len(elements)))
    theirs, _ = dist._compute_bucket_assignment_by_size(
        [torch.empty(count) for count in elements], [first, others], [], ready
    )
    assert buckets_of([4 * count for count in elements], first, others) == list(theirs)


def test_sizes_are_by_default_those_of_torch() -> None:
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == FIRST_BUCKET_BYTES
    assert torch.nn.parallel.distributed._DEFAULT_BUCKET_CAP_MB * 2**20 == BUCKET_BYTES


def _model() -> nn.Module:
    layer = nn.TransformerEncoderLayer(192, 4, 768, activation="gelu")
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


_SHAPE = (4, 2, 192)


def _bucket_sizes(rank: int, caps: list[int | None]) -> list[list[int]]:
    """Returns the bytes of the buckets that DDP has after its first steps, by size in MiB."""
    found = []
    for cap in caps:
        model = DistributedDataParallel(_model(), bucket_cap_mb=cap)
        for _ in range(3):
            model(torch.randn(_SHAPE)).sum().backward()
        text = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        found.append([int(size) for size in text.split(", ")])
    return found


def test_buckets_are_those_of_a_real_step() -> None:
    default, two = run(2, _bucket_sizes, [None, 2])[0]
    ops = dense_ops(_model(), _SHAPE)
    ready = [size for op in reversed(ops) for size in reversed(op.gradient_bytes)]

    def sizes(*limits: int) -> list[int]:
        return [sum(ready[i] for i in bucket) for bucket in buckets_of(ready, *limits)]

    assert default == sizes()
    assert len(default) == 2
    # A size of one's own is the first bucket's too.
    assert two == sizes(2 << 20, 2 << 20)
    assert len(two) > 2


# The last layer's gradient is ready after 8 us, in its bucket after 9.
_LAYERS = [
    LayerTimes(10.0, 20.0, (Gradient(10_000, 2.0, 3.0, 4.0), Gradient(5_000, 1.0, 1.0, 1.0))),
    LayerTimes(1.0, 2.0),
    LayerTimes(5.0, 6.0, (Gradient(10_000, 1.0, 2.0, 3.0),)),
]


def _steps() -> DenseSteps:
    return DenseSteps.of(_LAYERS, 2, COSTS, first_bucket_bytes=1, bucket_bytes=2**20)


def test_steps_by_hand() -> None:
    assert _steps() == DenseSteps(
        forward_us=16.0,
        # The last parameter's first: 5,000 bytes before 10,000.
        buckets=(Bucket(6.0 + 1.0, 50.0, 2.0), Bucket(22.0 + 1.0 + 2.0, 60.0, 4.0)),
        rest_us=0.0,
        optimizer_us=8.0,
    )
    assert DenseSteps.of(_LAYERS, 1, COSTS) == DenseSteps(16.0, (), 28.0, 8.0)
    before = [LayerTimes(1.0, 7.0), *_LAYERS]
    assert DenseSteps.of(before, 2, COSTS).rest_us == 7.0


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


def test_the_last_gradient_fills_no_bucket() -> None:
    sizes = [FIRST_BUCKET_BYTES, 10, 20]
    assert buckets_of(sizes) == [[0], [1, 2]]
    assert buckets_of([]) == []
    assert list(accumulate(map(len, buckets_of([1] * 5, 2, 2)))) == [2, 4, 5]

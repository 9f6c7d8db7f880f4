"""Steps from plans: without contention and host costs they are what the rating says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torchrec_bls.sharding.cost_interface import Estimate
from torchrec_bls.sharding.costs.host_costs import HostCosts
from torchrec_bls.sharding.problem.job import Job
from torchrec_bls.sharding.problem.options import make_problem
from torchrec_bls.sharding.problem.plan_groups import groups_of
from torchrec_bls.sharding.problem.tables import (
    PlacedShard,
    PlacedTable,
    Table,
    UniformReuse,
    Workload,
)
from torchrec_bls.sharding.report.prediction import rate
from torchrec_bls.sharding.search.search import search
from torchrec_bls.sharding.simulation.data_parallel import DenseSteps
from torchrec_bls.sharding.simulation.engine.timeline import simulate
from torchrec_bls.sharding.simulation.one_step import step_us
from torchrec_bls.sharding.simulation.plan_steps import program_of
from torchrec_bls.sharding.simulation.program import Ranks, graph_of

from tests.sharding.additive_costs import AdditiveTestCosts, random_workload, roomy

_RANKS, _BATCHES = 4, 6
# All bytes of the largest rank count, as where each has a core.
COSTS = AdditiveTestCosts(imbalance=1.0)


def _step_us(
    job: Job,
    cores: int = 2 * _RANKS,
    host: HostCosts | None = None,
    dense: DenseSteps | None = None,
) -> float:
    """Returns a step in the middle of many of a plan of ours."""
    workload = random_workload(3, 6, modules=2)
    plan = search(make_problem(workload, job, COSTS)).plan
    program = program_of(plan, workload, job, COSTS, host, dense)
    timeline = simulate(graph_of(program, Ranks.on_hosts(_RANKS, _RANKS, cores), _BATCHES))
    loads = timeline.start[timeline.graph.called("load")].reshape(_BATCHES, _RANKS).max(axis=1)
    return float(np.diff(loads)[-1])


def _rated_us(job: Job) -> float:
    workload = random_workload(3, 6, modules=2)
    plan = search(make_problem(workload, job, COSTS)).plan
    return rate(plan, workload, job, COSTS).step.microseconds


@pytest.mark.parametrize("training", [True, False])
def test_one_group_is_as_rated(training: bool) -> None:
    """With one group of exchanges nothing overlaps, and each phase is that of its slowest rank."""
    workload = random_workload(3, 6, types=("table_wise",))
    job = roomy(_RANKS, training=training)
    plan = search(make_problem(workload, job, COSTS)).plan
    program = program_of(plan, workload, job, COSTS)
    timeline = simulate(graph_of(program, Ranks.on_hosts(_RANKS, _RANKS, 2 * _RANKS), _BATCHES))
    rated = rate(plan, workload, job, COSTS)
    # Puts and reading wait for the slowest rank each, and so are never below the rating's one wait.
    phases = timeline.end.max() / _BATCHES
    expected = rated.step.microseconds
    if not training:
        # The rating charges for rows that the lookup has put already: half of their exchange.
        (group,) = groups_of(plan, workload, job)
        expected -= group.rows.max() * _RANKS / 1000 / 2
    assert phases == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("way", ["row_wise", "table_row_wise"])
def test_partial_sums_over_gloo_take_what_they_are_rated(way: str, training: bool) -> None:
    workload = random_workload(3, 6, types=(way,))
    # Where all ranks hold of all tables as much, a step is the sum of its exchanges and lookups.
    job = roomy(_RANKS, training=training, backend="gloo")
    plan = search(make_problem(workload, job, COSTS)).plan
    program = program_of(plan, workload, job, COSTS)
    timeline = simulate(graph_of(program, Ranks.on_hosts(_RANKS, _RANKS, 2 * _RANKS), _BATCHES))
    rated = rate(plan, workload, job, COSTS).step.microseconds
    assert timeline.end.max() / _BATCHES == pytest.approx(rated)


@pytest.mark.parametrize("backend", ["bls", "gloo"])
def test_host_costs_come_on_top(backend: str) -> None:
    job = roomy(_RANKS, backend=backend)
    without = _step_us(job)
    host, dense = HostCosts(step=100.0), DenseSteps(forward_us=20.0, rest_us=3.0)
    assert _step_us(job, host=host, dense=dense) == pytest.approx(without + 123.0)


@pytest.mark.parametrize("backend", ["bls", "gloo"])
def test_a_step_is_as_many_times_longer_as_all_of_its_parts(backend: str) -> None:
    job = roomy(_RANKS, backend=backend)
    costs = {"lookup": 1.0, "exchange": 1.0, "step": 100.0, "group": 30.0, "feature": 5.0}
    costs |= {"shard": 7.0, "id_byte": 0.01, "result_byte": 0.02}
    twice = {name: 2 * each for name, each in costs.items()}
    once = _step_us(job, host=HostCosts(**costs))
    assert _step_us(job, host=HostCosts(**twice)) == pytest.approx(2 * once)
    for name in costs:
        assert _step_us(job, host=HostCosts(**{**costs, name: twice[name]})) > once
    # All tables are pooled.
    others = HostCosts(**costs, feature_unpooled=5.0, result_byte_unpooled=0.02)
    assert _step_us(job, host=others) == once


def test_what_is_split_costs_more() -> None:
    """By rows the own samples' ids are sorted by rank, and columns without pooling are put together
    again; both are charged by the byte."""
    workload = Workload(
        [Table("t", 100, 8, "m", pooled=False)], {"m.t": UniformReuse(100, ids := 3.0)}
    )
    job, (table,) = roomy(2, training=False), workload.tables
    own_ids = job.batch * (ids * 8 + 2 * 4)  # with lengths for both ranks
    for way, shards, costs, expected in (
        ("row_wise", [(50, 8, 0, 0), (50, 8, 50, 0)], (7.0, 0.01, 9.0), 7.0 + 0.01 * own_ids),
        ("column_wise", [(100, 4, 0, 0), (100, 4, 0, 4)], (7.0, 0.01, 9.0), 9.0),
    ):
        placed = [PlacedShard(rank, *shard) for rank, shard in enumerate(shards)]
        plan = [PlacedTable(table, way, tuple(placed))]
        group, own, column = costs
        host = HostCosts(split_group=group, split_id_byte=own)
        host = replace(host, column_byte_unpooled=column / (job.batch * ids * 8 * 4))
        more = step_us(plan, workload, job, COSTS, host) - step_us(plan, workload, job, COSTS)
        assert more == pytest.approx(expected)


@pytest.mark.parametrize("backend", ["bls", "gloo"])
def test_half_the_cores_take_longer(backend: str) -> None:
    job = roomy(_RANKS, backend=backend)
    assert 1.3 * _step_us(job) < _step_us(job, cores=_RANKS // 2)


def test_three_exchanges_of_ids_over_gloo() -> None:
    job = roomy(_RANKS)
    gloo = replace(job, backend="gloo")
    # The rating knows that, too.
    assert _step_us(gloo) / _step_us(job) == pytest.approx(
        _rated_us(gloo) / _rated_us(job), rel=0.2
    )


def test_lag_hides_delays_of_inference() -> None:
    delays = np.random.default_rng(1).uniform(0, 3000, (_RANKS, 60))
    ends = []
    for bound in (0, 1, 4):
        job = roomy(_RANKS, training=False, bound=bound)
        workload = random_workload(3, 6, modules=2)
        plan = search(make_problem(workload, job, COSTS)).plan
        program = program_of(plan, workload, job, COSTS, dense=DenseSteps(forward_us=300.0))
        graph = graph_of(program, Ranks.on_hosts(_RANKS, _RANKS, _RANKS), 60, delays)
        ends.append(simulate(graph).end.max())
    assert ends[0] > 1.1 * ends[1] > 1.1 * ends[2]


class WaitingCosts(AdditiveTestCosts):
    """Of collectives a quarter is work, the rest no core's."""

    def all_to_all(self, *arguments: Any, **others: Any) -> Estimate:
        return replace(super().all_to_all(*arguments, **others), on_core=0.25)

    def all_reduce(self, *arguments: Any, **others: Any) -> Estimate:
        return replace(super().all_reduce(*arguments, **others), on_core=0.25)


@pytest.mark.parametrize("backend", ["bls", "gloo"])
def test_what_collectives_wait_for_takes_no_core(backend: str) -> None:
    workload, job = random_workload(3, 6, modules=2), roomy(_RANKS, backend=backend)
    plan = search(make_problem(workload, job, COSTS)).plan
    ends: dict[tuple[str, int], float] = {}
    for costs in (COSTS, WaitingCosts(COSTS.imbalance)):
        program = program_of(plan, workload, job, costs)
        for cores in (1, 2 * _RANKS):
            graph = graph_of(program, Ranks.on_hosts(_RANKS, _RANKS, cores), 1)
            ends[type(costs).__name__, cores] = float(simulate(graph).end.max())
    usual, waiting = "AdditiveTestCosts", "WaitingCosts"
    # With a core a thread it makes no difference; ranks of channels spin.
    assert ends[waiting, 2 * _RANKS] == pytest.approx(ends[usual, 2 * _RANKS])
    if backend == "bls":
        assert ends[waiting, 1] == pytest.approx(ends[usual, 1])
    else:
        assert ends[waiting, 1] < 0.9 * ends[usual, 1]


def test_a_rank_alone_exchanges_nothing() -> None:
    workload = random_workload(3, 2)
    job = roomy(1)
    plan = search(make_problem(workload, job, COSTS)).plan
    names = [type(stage).__name__ for stage in program_of(plan, workload, job, COSTS)]
    assert set(names) == {"Work"}

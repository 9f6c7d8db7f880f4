"""Bounds compared by simulation, and the one that is worth it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torchrec_bls.sharding.problem.options import make_problem
from torchrec_bls.sharding.problem.tables import ROW_WISE
from torchrec_bls.sharding.report.prediction import rate
from torchrec_bls.sharding.search.search import search
from torchrec_bls.sharding.simulation.bounds import (
    BoundOutcome,
    Simulation,
    choose_bound,
    simulate_bounds,
)
from torchrec_bls.sharding.simulation.data_parallel import DenseSteps
from torchrec_bls.sharding.simulation.delays import read_delays
from torchrec_bls.sharding.simulation.program import Ranks

from tests.sharding.additive_costs import AdditiveTestCosts, random_workload, roomy

COSTS = AdditiveTestCosts()
# Row-wise tables are the same work for all ranks: without delays nobody waits for another one.
WORKLOAD = random_workload(3, 6, (ROW_WISE,))
JOB = roomy(4, training=False)
PLAN = search(make_problem(WORKLOAD, JOB, COSTS)).plan


def simulated(
    delays: str, bounds: list[int], dense: DenseSteps | None = None
) -> list[BoundOutcome]:
    ranks = Ranks.on_hosts(4, 4, 4)
    simulation = Simulation(ranks, read_delays(delays), 100, dense=dense)
    return simulate_bounds(PLAN, WORKLOAD, JOB, COSTS, bounds, simulation)


def test_delays_that_move_are_worth_a_bound_and_a_straggler_is_not() -> None:
    moving = simulated("uniform:0-10ms", [0, 1, 2, 4])
    assert choose_bound(moving).bound > 0
    assert [each.step_us for each in moving] == sorted(
        (each.step_us for each in moving), reverse=True
    )
    straggler = simulated("ranks:0,0,10ms,0", [0, 1, 2, 4])
    assert choose_bound(straggler).bound == 0
    none = simulated("none", [0, 1, 2, 4])
    assert choose_bound(none).bound == 0


def test_without_lag_the_step_is_the_slowest_ranks_delay_and_work() -> None:
    dense = DenseSteps(forward_us=500.0)
    (without,) = simulated("none", [0], dense)
    (constant,) = simulated("constant:5ms", [0], dense)
    assert constant.step_us == pytest.approx(without.step_us + 5000)
    assert constant.latency_us == pytest.approx(without.latency_us + 5000)
    p50, p95, p99 = constant.step_percentiles_us
    assert p50 == pytest.approx(p95) == pytest.approx(p99) == pytest.approx(constant.step_us)


def test_latency_grows_by_two_steps_for_each_of_the_bound() -> None:
    outcomes = simulated("constant:5ms", [0, 1, 2])
    for outcome in outcomes:
        steps = 1 + 2 * outcome.bound
        assert outcome.latency_us / outcome.step_us == pytest.approx(steps, rel=0.2)


def test_memory_is_the_ratings() -> None:
    for outcome in simulated("none", [0, 3]):
        rating = rate(PLAN, WORKLOAD, replace(JOB, bound=outcome.bound), COSTS)
        assert outcome.memory_bytes == max(rank.memory_bytes for rank in rating.ranks)


def outcome(bound: int, step: float, memory: float, latency: float) -> BoundOutcome:
    nothing: Any = None
    return BoundOutcome(bound, step, (step, step, step), latency, memory, nothing)


CURVE = [outcome(0, 13.0, 10, 13), outcome(1, 10.2, 20, 30), outcome(4, 10.0, 50, 90)]


@pytest.mark.parametrize(
    ("limits", "chosen"),
    [
        ({}, 1),  # 2 % slower than the fastest, and smaller
        ({"max_memory_bytes": 15}, 0),
        ({"max_latency_us": 30}, 1),
        ({"max_latency_us": 29}, 0),
    ],
)
def test_the_smallest_that_is_nearly_the_fastest(limits: dict[str, float], chosen: int) -> None:
    assert choose_bound(CURVE, **limits).bound == chosen  # type: ignore[arg-type]


def test_limits_that_nothing_is_within() -> None:
    with pytest.raises(ValueError, match="no bound is within the limits: bound 0 needs"):
        choose_bound(CURVE, max_memory_bytes=5)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["memory", "latency"])
def test_limits_that_are_none(name: str, limit: float) -> None:
    option = {"memory": "max_memory_bytes", "latency": "max_latency_us"}[name]
    with pytest.raises(ValueError, match=f"the limit of {name} is {limit}, but must be a positive"):
        choose_bound(CURVE, **{option: limit})  # type: ignore[arg-type]


def test_training_with_lag_is_refused() -> None:
    simulation = Simulation(Ranks.on_hosts(4, 4, 4), read_delays("none"))
    with pytest.raises(ValueError, match="bound is 1, but only bound 0 trains"):
        simulate_bounds(PLAN, WORKLOAD, replace(JOB, training=True), COSTS, [1], simulation)


def test_training_is_simulated_to_its_last_backward() -> None:
    simulation = Simulation(Ranks.on_hosts(4, 4, 4), read_delays("none"), 20)
    training = replace(JOB, training=True)
    (outcome,) = simulate_bounds(PLAN, WORKLOAD, training, COSTS, [0], simulation)
    assert outcome.step_us > simulated("none", [0])[0].step_us
    assert outcome.timeline.end.max() == pytest.approx(20 * outcome.step_us, rel=0.05)


def test_too_few_batches() -> None:
    simulation = Simulation(Ranks.on_hosts(4, 4, 4), read_delays("none"), 20)
    with pytest.raises(ValueError, match="20 batches are too few to tell a step at bound 8 from"):
        simulate_bounds(PLAN, WORKLOAD, JOB, COSTS, [0, 8], simulation)


def test_the_same_delays_for_every_bound() -> None:
    first, again = simulated("uniform:0-10ms", [0]), simulated("uniform:0-10ms", [1, 0])
    np.testing.assert_array_equal(first[0].timeline.end, again[1].timeline.end)

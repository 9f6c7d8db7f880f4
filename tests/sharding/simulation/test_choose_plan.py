"""Of several plans the one with the fastest simulated step, unless the first is as good."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrec_bls.sharding.calibration.step_models import (
    ModelRanges,
    draw_step_model,
    plans_by_hand,
)
from torchrec_bls.sharding.costs.host_costs import HostCosts, HostModel
from torchrec_bls.sharding.simulation.choose_plan import choose_plan
from torchrec_bls.sharding.simulation.one_step import step_us

from tests.sharding.additive_costs import AdditiveTestCosts

COSTS = AdditiveTestCosts()
HOST = HostModel("bls", True, 4, HostCosts(step=100.0, shard=50.0), (-0.1, 0.2), 0.0, 4.0)
RANGES = ModelRanges(rows=(100, 2000), pooling=(1, 4), batch=(16, 64))


@given(number=st.integers(0, 100), doubt=st.floats(0, 1))
def test_the_fastest_plan_is_taken_where_it_is_faster_beyond_doubt(
    number: int, doubt: float
) -> None:
    model = draw_step_model("model", (number,), RANGES)
    workload, job = model.workload(4), model.job(4, 4, "bls", training=True)
    plans = list(plans_by_hand(workload, job).values())
    steps = [step_us(plan, workload, job, COSTS, HOST.costs) for plan in plans]
    choice = choose_plan(plans, workload, job, COSTS, HOST)
    assert [each.microseconds for each in choice.steps] == steps
    assert steps[choice.chosen] == min(steps)
    assert choice.gain == steps[0] / min(steps)
    assert not choice.abstained
    doubtful = choose_plan(plans, workload, job, COSTS, replace(HOST, between_plans_log=doubt))
    if steps[0] / min(steps) < 2.718281828459045**doubt:
        assert doubtful.chosen == 0
        assert doubtful.abstained == (min(steps) < steps[0])
    else:
        assert doubtful.chosen == choice.chosen


def test_no_plans() -> None:
    model = draw_step_model("model", (0,), RANGES)
    workload, job = model.workload(4), model.job(4, 4, "bls", training=True)
    with pytest.raises(ValueError, match="no plans to choose from"):
        choose_plan([], workload, job, COSTS, HOST)

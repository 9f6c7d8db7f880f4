"""Host costs are found again from steps that were simulated with them."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from torchrec_bls.sharding.calibration.step_models import (
    ModelRanges,
    draw_step_model,
    plans_by_hand,
)
from torchrec_bls.sharding.costs.host_costs import HostCosts
from torchrec_bls.sharding.simulation.fit_host import MeasuredPlan, fit_host, host_model
from torchrec_bls.sharding.simulation.one_step import step_us

from tests.sharding.additive_costs import AdditiveTestCosts

COSTS = AdditiveTestCosts()
TRUE = HostCosts(
    *(1.0, 1.0, 400.0, 50.0, 80.0, 30.0, 45.0, 12.0, 0.004, 0.006, 0.002, 0.003),
    column_module_unpooled=150.0,
    column_byte_unpooled=0.001,
)
RANGES = ModelRanges(tables=(1, 4), rows=(100, 2000), pooling=(1, 4), batch=(16, 64))


def steps_of(
    models: int,
    backend: str,
    cores: int,
    *,
    noise: float = 0.0,
    of_model: float = 0.0,
    true: HostCosts = TRUE,
    ranges: ModelRanges = RANGES,
) -> list[MeasuredPlan]:
    """Returns plans of drawn models on 4 ranks, with steps that are off by so much."""
    random = np.random.default_rng(0)
    measured = []
    for number in range(models):
        model = draw_step_model(f"model {number}", (7, number), ranges)
        workload, job = model.workload(4), model.job(4, cores, backend, training=True)
        common = random.normal(0, of_model)
        for plan in plans_by_hand(workload, job).values():
            us = step_us(plan, workload, job, COSTS, true)
            us *= np.exp(common + random.normal(0, noise, 20))
            measured.append(MeasuredPlan(model.name, plan, workload, job, us))
    return measured


@pytest.mark.parametrize("backend", ["bls", "gloo"])
@pytest.mark.parametrize("cores", [4, 2])
def test_exact_steps_give_the_costs_back(backend: str, cores: int) -> None:
    measured = steps_of(12, backend, cores)
    # Each kind of collection is in several models, so that none is predicted without its kind.
    kinds = [{placed.table.pooled for placed in plan.plan} for plan in measured[::3]]
    assert min(sum(pooled in kind for kind in kinds) for pooled in (True, False)) > 2
    fit = fit_host(measured, COSTS)
    truth = np.array([plan.typical_us for plan in measured])
    np.testing.assert_allclose(fit.held_out_us, truth, rtol=0.02)
    for name, cost in asdict(fit.costs).items():
        assert cost == pytest.approx(getattr(TRUE, name), rel=0.2), name


def test_steps_decide_how_lookups_fare_within_them() -> None:
    """Where they are most of a step they outweigh what is taken for granted."""
    true = replace(TRUE, lookup=1.5)
    ranges = replace(RANGES, pooling=(1, 200), batch=(100, 2000))
    fit = fit_host(steps_of(10, "bls", 4, true=true, ranges=ranges), COSTS)
    assert fit.costs.lookup == pytest.approx(1.5, rel=0.02)


def test_a_model_is_predicted_without_its_own_steps() -> None:
    """Steps of one model that are twice as long change the prediction of all others alone."""
    # Of six only one other has an unpooled collection, too few to tell its costs apart.
    measured = steps_of(12, "bls", 4)
    strange = [
        replace(plan, us=2 * np.asarray(plan.us)) if plan.model == "model 0" else plan
        for plan in measured
    ]
    own = np.array([plan.model == "model 0" for plan in measured])
    before, after = fit_host(measured, COSTS), fit_host(strange, COSTS)
    np.testing.assert_allclose(after.held_out_us[own], before.held_out_us[own], rtol=0.15)


def test_the_interval_holds_nine_of_ten_steps_and_plans_are_told_apart() -> None:
    measured = steps_of(12, "bls", 4, noise=0.1, of_model=0.0)
    model = host_model(measured, COSTS)
    low, high = model.interval_log
    # The 5th and 95th percentile of a normal distribution with that deviation, and the fit's error.
    assert -0.25 < low < -0.12
    assert 0.12 < high < 0.25
    again = host_model(steps_of(12, "bls", 4, noise=0.0, of_model=0.1), COSTS)
    # What plans of a model have in common does not make them less different.
    assert again.between_plans_log < 0.05
    assert again.held_out_gmae_percent > 2
    assert (model.backend, model.training, model.world_size) == ("bls", True, 4)

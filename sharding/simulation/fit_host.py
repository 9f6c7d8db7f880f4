"""Fits host costs to measured steps of small models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..cost_interface import CostModel
from ..costs.fitting.accuracy import gmae_percent
from ..costs.fitting.intervals import interval_log
from ..costs.fitting.least_squares import nonnegative_relative
from ..costs.host_costs import NAMES, HostCosts, HostModel
from ..problem.job import Job
from ..problem.tables import PlacedTable, Workload
from .engine.task_graph import Floats
from .engine.timeline import simulate
from .one_step import one_step

# Rough values, microseconds: the start of the fit, and the size of its first changes.
_TYPICAL = HostCosts(
    lookup=1.0,
    exchange=1.0,
    step=500.0,
    group=100.0,
    split_group=100.0,
    feature=20.0,
    feature_unpooled=20.0,
    shard=20.0,
    id_byte=0.002,
    split_id_byte=0.002,
    result_byte=0.001,
    result_byte_unpooled=0.001,
    column_module_unpooled=100.0,
    column_byte_unpooled=0.0002,
)
_CHANGE = 0.01
_ROUNDS = 3


@dataclass(frozen=True)
class MeasuredPlan:
    """The steps of a plan.

    Attributes:
        model: name of the model; all its plans are held out together.
        plan: places of the tables.
        workload: the tables.
        job: job that the plan is for.
        us: (steps,), microseconds of the slowest rank.
    """

    model: str
    plan: Sequence[PlacedTable]
    workload: Workload
    job: Job
    us: Sequence[float]

    @property
    def typical_us(self) -> float:
        """Returns the median of the steps."""
        return float(np.median(self.us))


@dataclass(frozen=True)
class HostFit:
    """Host costs, and their predictions of plans that they were not fitted to.

    Attributes:
        costs: costs fitted to all plans.
        held_out_us: (plans,), each plan's step by costs fitted to the other models' plans.
    """

    costs: HostCosts
    held_out_us: Floats


def fit_host(measured: Sequence[MeasuredPlan], model: CostModel) -> HostFit:
    """Returns the host costs with the least relative errors.

    A simulated step grows in proportion to all costs together, lookups and exchanges included. So
    it is a sum: each cost times what the step gains with it. The sum is linear in the costs as long
    as the same tasks are late. The fit has one more target, that lookups and exchanges take as long
    within a step as alone. It counts as much as a measured plan. For where all models are alike,
    these factors can't be told from the other costs.

    Args:
        measured: plans of at least two models, with one backend, kind and number of ranks.
        model: model of lookups and exchanges.
    """
    target = np.array([plan.typical_us for plan in measured])
    costs = np.array([getattr(_TYPICAL, name) for name in NAMES])
    plans = [_Gains(plan, model) for plan in measured]
    for _ in range(_ROUNDS):
        gains = np.stack([plan.at(costs) for plan in plans])
        costs = _fitted(gains, target)
    names = np.array([plan.model for plan in measured])
    held_out = np.empty(len(measured))
    for name in np.unique(names):
        its_own = names == name
        fitted = _fitted(gains[~its_own], target[~its_own])
        for index in np.flatnonzero(its_own):
            held_out[index] = plans[index].step(fitted)
    return HostFit(_costs(costs), held_out)


def _fitted(gains: Floats, target: Floats) -> Floats:
    alone = np.eye(len(NAMES))[[NAMES.index("lookup"), NAMES.index("exchange")]]
    return nonnegative_relative(np.vstack([gains, alone]), np.concatenate([target, [1.0, 1.0]]))


def host_model(measured: Sequence[MeasuredPlan], model: CostModel) -> HostModel:
    """Returns the host costs fitted to plans, for a profile; arguments are those of `fit_host`."""
    fit = fit_host(measured, model)
    steps = [
        np.log(plan.us) - np.log(us) for plan, us in zip(measured, fit.held_out_us, strict=True)
    ]
    typical = np.array([plan.typical_us for plan in measured])
    errors, names = np.log(typical / fit.held_out_us), np.array([plan.model for plan in measured])
    # An error that the plans of a model share does not change their order.
    apart = [errors[names == name] - errors[names == name].mean() for name in np.unique(names)]
    freedom = max(len(errors) - len(apart), 1)
    of_one = float(np.sqrt(np.square(np.concatenate(apart)).sum() / freedom))
    job = measured[0].job
    return HostModel(
        backend=job.backend,
        training=job.training,
        world_size=job.ranks,
        costs=fit.costs,
        interval_log=interval_log(np.concatenate(steps)),
        between_plans_log=float(np.sqrt(2)) * of_one,
        held_out_gmae_percent=round(gmae_percent(fit.held_out_us, typical), 2),
    )


class _Gains:
    """The dependence of a plan's step on host costs.

    The work of every task is a sum of costs times constants, and the tasks stay the same.
    """

    def __init__(self, plan: MeasuredPlan, model: CostModel) -> None:
        units = [
            one_step(plan.plan, plan.workload, plan.job, model, _costs(row)).graph
            for row in np.eye(len(NAMES))
        ]
        self._graph = units[0]
        self._work = np.stack([graph.work for graph in units])

    def at(self, costs: Floats) -> Floats:
        """Returns (costs,), the growth of a step's time with a unit of each cost."""
        here = self.step(costs)
        changes = _CHANGE * np.array([getattr(_TYPICAL, name) for name in NAMES])
        each = [self.step(costs + row) for row in np.diag(changes)]
        return (np.array(each) - here) / changes

    def step(self, costs: Floats) -> float:
        """Returns the microseconds of a step."""
        return float(simulate(replace(self._graph, work=costs @ self._work)).end.max())


def _costs(values: Sequence[float] | Floats) -> HostCosts:
    return HostCosts(**{name: float(value) for name, value in zip(NAMES, values, strict=True)})

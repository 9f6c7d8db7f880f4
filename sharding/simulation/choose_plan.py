"""Chooses one of several plans by their simulated steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cost_interface import CostModel, Estimate
from ..costs.host_costs import HostModel
from ..problem.job import Job
from ..problem.tables import PlacedTable, Workload
from .one_step import step_us

Plan = tuple[PlacedTable, ...]


@dataclass(frozen=True)
class PlanChoice:
    """The simulated steps, and the plan to take.

    Attributes:
        steps: steps of each plan, with the interval that holds 9 of 10 measured ones.
        chosen: index of the plan to take.
        abstained: whether another plan is simulated to be faster, but only by less than the error
            of simulations of one model's plans. Then the first plan stays.
    """

    steps: Sequence[Estimate]
    chosen: int
    abstained: bool

    @property
    def gain(self) -> float:
        """Returns the first plan's step over the chosen one's, at least 1."""
        return self.steps[0].microseconds / self.steps[self.chosen].microseconds

    @property
    def text(self) -> str:
        """Returns in words what was simulated and chosen."""
        step, number = self.steps[self.chosen], len(self.steps)
        text = (
            f"{step.microseconds:,.0f} us ({step.low:,.0f} to {step.high:,.0f}), all of it but the "
            f"dense layers; {number} {'plan was' if number == 1 else 'plans were'} simulated"
        )
        if self.chosen:
            text += f", and the one with the least predicted step takes {self.gain:.2f} x it"
        elif self.abstained:
            text += ", and none is faster than this one beyond doubt"
        return text


def choose_plan(
    plans: Sequence[Plan],
    workload: Workload,
    job: Job,
    model: CostModel,
    host: HostModel,
) -> PlanChoice:
    """Simulates a step of each plan and takes the fastest one, unless the first is as good.

    Args:
        plans: plans to choose from; the first stays unless another one is faster beyond doubt.
        workload: the tables.
        job: job that the plans are for.
        model: model of lookups and exchanges.
        host: costs beside lookups and exchanges.

    Raises:
        ValueError: there are no plans.
    """
    if not plans:
        raise ValueError("there are no plans to choose from")
    steps = [step_us(plan, workload, job, model, host.costs) for plan in plans]
    fastest = int(np.argmin(steps))
    doubtful = bool(np.log(steps[0] / steps[fastest]) < host.between_plans_log)
    return PlanChoice(
        steps=[host.interval(step) for step in steps],
        chosen=0 if doubtful else fastest,
        abstained=doubtful and fastest != 0,
    )

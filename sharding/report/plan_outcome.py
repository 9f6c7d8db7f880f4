"""A plan that the search found, with its prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..cost_interface import Estimate
from ..problem.job import Job
from ..simulation.choose_plan import PlanChoice
from .prediction import Rating

#: What a predicted step holds, and what not.
SCOPE = "lookups and exchanges alone; permuting ids, autograd, Python and dense layers come on top"


@dataclass(frozen=True)
class Decision:
    """How and why a table is sharded.

    Attributes:
        table: name of the table.
        module: path of its module.
        rows: number of rows.
        dim: number of columns.
        choice: option in words.
        ranks: ranks of the shards.
        reason: reason in words.
        runner_up: next best option in words, with its ranks free and the rest of the plan
            unchanged; None where there is none.
        runner_up_us: microseconds that the runner-up would add to the step.
    """

    table: str
    module: str
    rows: int
    dim: int
    choice: str
    ranks: Sequence[int]
    reason: str
    runner_up: str | None
    runner_up_us: float


@dataclass(frozen=True)
class PlanOutcome:
    """A plan that the search found: prediction, decisions with their reasons, and a measurement.

    Attributes:
        job: job that the plan is for.
        rating: the prediction.
        objective_us: microseconds that the search minimised.
        lower_bound_us: microseconds that no plan's objective is below.
        decisions: one decision a table.
        measured_us: measured microseconds by name, "step" or a phase; empty without a measurement.
        choice: how the plan was chosen, if steps were simulated.
    """

    job: Job
    rating: Rating
    objective_us: float
    lower_bound_us: float
    decisions: Sequence[Decision]
    measured_us: Mapping[str, float]
    choice: PlanChoice | None = None

    @property
    def simulated(self) -> str:
        """Returns in words what was simulated; empty if nothing was."""
        return "" if self.choice is None else self.choice.text

    @property
    def gap(self) -> float:
        """Returns how far at most the plan's objective is above the best one: 0.02 is 2 %."""
        return self.objective_us / self.lower_bound_us - 1 if self.lower_bound_us > 0 else 0.0

    @property
    def aside(self) -> str:
        """Returns why the search's time for the plan differs from the predicted one, or nothing."""
        predicted = self.rating.step.microseconds
        if math.isclose(self.objective_us, predicted, rel_tol=1e-3):
            return ""
        return (
            f". The search counted {self.objective_us:,.0f} us for this plan: what an unpooled "
            "table's backward takes depends on which tables are beside it"
        )

    def compared(self) -> list[tuple[str, Estimate, float]]:
        """Returns name, prediction and measured microseconds of each measurement."""
        predicted = {**self.rating.phases, "step": self.rating.step}
        return [(name, predicted[name], time) for name, time in self.measured_us.items()]

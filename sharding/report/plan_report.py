"""A plan's report, and how it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..cost_interface import CostModel, Estimate
from ..problem.options import Option, Problem
from ..problem.tables import Workload
from ..search.placement import Placement
from ..search.search import SearchResult
from ..simulation.choose_plan import PlanChoice
from .parts import as_html, as_text
from .plan_outcome import Decision, PlanOutcome
from .prediction import rate

FORMAT = 1


@dataclass(frozen=True)
class PlanReport(PlanOutcome):
    """A plan with its prediction, as text, as a page and for machines."""

    def as_text(self) -> str:
        """Returns the report as text of at most 100 columns."""
        return as_text(self)

    def as_html(self) -> str:
        """Returns the report as one HTML page that loads nothing from elsewhere."""
        return as_html(self)

    def with_measurement(self, measured_us: Mapping[str, float]) -> PlanReport:
        """Returns this report with measured microseconds of the "step" and of phases.

        Raises:
            ValueError: a name is neither, or a time is not positive.
        """
        for name, time in measured_us.items():
            if name != "step" and name not in self.rating.phases:
                known = ", ".join(["step", *self.rating.phases])
                raise ValueError(f"measured '{name}', but the prediction has {known}")
            if not time > 0:
                raise ValueError(f"measured '{name}' is {time} microseconds")
        return replace(self, measured_us=dict(measured_us))

    def as_json(self) -> dict[str, Any]:
        """Returns the report for machines; times are microseconds, memory is bytes."""
        job = self.job
        return {
            "format": FORMAT,
            "job": {
                "ranks": job.ranks,
                "ranks_per_host": job.host_ranks,
                "batch_per_rank": job.batch,
                "backend": job.backend,
                "bound": job.bound,
                "training": job.training,
                "memory_bytes": list(job.memory_bytes),
                "memory_kind": job.memory_kind,
            },
            "step_us": _times(self.rating.step),
            "phases_us": {name: _times(time) for name, time in self.rating.phases.items()},
            "objective_us": self.objective_us,
            "lower_bound_us": self.lower_bound_us,
            "simulated_us": [_times(step) for step in self.choice.steps] if self.choice else [],
            "chosen_of_simulated": self.choice.chosen if self.choice else None,
            "ranks": [
                {
                    "compute_us": _times(rank.compute),
                    "communication_us": _times(rank.communication),
                    "shards": rank.shards,
                    "shard_bytes": rank.shard_bytes,
                    "slot_bytes": rank.slot_bytes,
                    "result_bytes": rank.result_bytes,
                }
                for rank in self.rating.ranks
            ],
            "decisions": [
                {**vars(decision), "ranks": list(decision.ranks)} for decision in self.decisions
            ],
            "measured_us": dict(self.measured_us),
        }


def _times(estimate: Estimate) -> dict[str, float]:
    return {"predicted": estimate.microseconds, "low": estimate.low, "high": estimate.high}


def make_report(
    workload: Workload,
    found: SearchResult,
    model: CostModel,
    *,
    choice: PlanChoice | None = None,
) -> PlanReport:
    """Returns the report of a plan that the search found.

    Args:
        workload: the tables.
        found: outcome of the search.
        model: costs that the search used.
        choice: how the plan was chosen, if steps were simulated.
    """
    problem = found.placement.problem
    return PlanReport(
        job=problem.job,
        rating=rate(found.plan, workload, problem.job, model),
        objective_us=found.objective,
        lower_bound_us=found.lower_bound,
        decisions=_decisions(found.placement),
        measured_us={},
        choice=choice,
    )


def in_words(option: Option) -> str:
    """Returns an option as text, e.g. "column_wise, 4 x 32 columns"."""
    if option.sharding_type == "column_wise":
        if option.shards == 1:
            return "column_wise, whole"
        return f"column_wise, {option.shards} x {option.columns} columns"
    if option.shards == 1:
        return option.sharding_type
    return f"{option.sharding_type}, {option.shards} x {option.rows:,} rows"


def _decisions(found: Placement) -> list[Decision]:
    """Tries every option of each table in place of the chosen one, with the rest unchanged."""
    problem, placement = found.problem, found.copy()
    ends = np.append(problem.first_options, len(problem.options))
    decisions = []
    for index, table in enumerate(problem.tables):
        chosen, ranks = placement.take(index)
        alternatives: list[tuple[float, int]] = []
        too_large: list[int] = []
        for option in _possible(placement, range(ends[index], ends[index + 1])):
            there, _ = placement.best_ranks(option)
            if there is None:
                too_large.append(option)
            elif option != chosen:
                placement.put(option, there)
                alternatives.append((placement.cost, option))
                placement.take(index)
        placement.put(chosen, ranks)
        best = min(alternatives, default=None)
        added = best[0] - placement.cost if best else 0.0
        decisions.append(
            Decision(
                table=table.name,
                module=table.module,
                rows=table.rows,
                dim=table.dim,
                choice=in_words(problem.options[chosen]),
                ranks=ranks.tolist(),
                reason=_reason(problem, chosen, too_large, best, added),
                runner_up=in_words(problem.options[best[1]]) if best else None,
                runner_up_us=added,
            )
        )
    return decisions


def _possible(placement: Placement, options: Iterable[int]) -> list[int]:
    """Returns the options of a table that the rest of the plan allows: one width in a
    collection."""
    every = placement.problem.options
    taken = {every[option].group for option in placement.option if option >= 0}
    widths = {group for group in taken if "/" in group}
    return [o for o in options if "/" not in every[o].group or widths <= {every[o].group}]


def _reason(
    problem: Problem,
    chosen: int,
    too_large: list[int],
    best: tuple[float, int] | None,
    added: float,
) -> str:
    if best is None:
        if too_large:
            return f"nothing else fits into the {problem.job.memory_kind}"
        return "the only way that sharder and constraints leave"
    no_room = ""
    if problem.options[chosen].shards > 1 and any(
        problem.options[option].shards == 1 for option in too_large
    ):
        no_room = "whole it fits on no rank; "
    if added > 1e-6 * best[0]:
        return f"{no_room}all others make the step longer"
    work = problem.costs.sum(axis=1) * problem.option_shards
    if work[chosen] <= work[best[1]]:
        return f"{no_room}least work, the step is as long"
    return f"{no_room}the step is as long, but other ranks are closer to the mean"

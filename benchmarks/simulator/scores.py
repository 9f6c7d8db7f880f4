"""How well steps and choices of plans are predicted, each model's by what was fitted to the others.

Beside our simulation stand what is simulated without any fit, lookups alone, and an affine
correction of the planner's rating. Intervals are of models drawn again and again (bootstrap).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torchrec_bls.sharding.costs.fitting.accuracy import bias_percent, gmae_percent, mape_percent
from torchrec_bls.sharding.costs.fitting.least_squares import nonnegative_relative
from torchrec_bls.sharding.costs.profiled import ProfiledCosts
from torchrec_bls.sharding.report.prediction import rate
from torchrec_bls.sharding.simulation.fit_host import MeasuredPlan, fit_host
from torchrec_bls.sharding.simulation.one_step import step_us

from benchmarks.harness.statistics import share_interval
from benchmarks.planner.page import NEAR, regrets
from benchmarks.planner.random_models import TABLE_III
from benchmarks.simulator.steps import SAME, job_of, model_of, unpacked

Floats = NDArray[np.float64]
OURS, AFFINE, UNFITTED, LOOKUPS = (
    "simulated",
    "rating, affine",
    "simulated without host costs",
    "lookups alone",
)
_DRAWS = 2000


class Predicted(NamedTuple):
    """Plans of one suite and kind: by method the predicted microseconds of each."""

    names: Sequence[str]
    measured: Sequence[MeasuredPlan]
    by_method: dict[str, Floats]

    @property
    def models(self) -> NDArray[Any]:
        return np.array([each.model for each in self.measured])

    @property
    def us(self) -> Floats:
        return np.array([each.typical_us for each in self.measured])


def measured_plans(raw: dict[str, Any], suite: str) -> dict[str, tuple[list[str], list[Any]]]:
    """By backend and kind the names of plans and the plans."""
    kinds: defaultdict[str, tuple[list[str], list[Any]]] = defaultdict(lambda: ([], []))
    visits: defaultdict[int, list[Any]] = defaultdict(list)
    for entry in raw["results"]:
        if entry["suite"] == suite:
            visits[entry["model"]].append(entry["plans"])
    for number, (plans_of_visit, *again) in visits.items():
        model = model_of(number)
        job = job_of(suite, number, model)
        workload = model.workload(job.ranks)
        names, plans = kinds[f"{job.backend}, {'training' if job.training else 'inference'}"]
        for name, each in plans_of_visit.items():
            us = [*each["us"], *(us for visit in again for us in visit[name]["us"])]
            names.append(name)
            plan = unpacked(each["tables"], workload)
            plans.append(MeasuredPlan(model.name, plan, workload, job, us))
    return dict(kinds)


def predicted(names: list[str], plans: list[MeasuredPlan], costs: ProfiledCosts) -> Predicted:
    """All methods, each fitted without the model that it predicts."""
    ratings = [rate(each.plan, each.workload, each.job, costs) for each in plans]
    rated = np.array([rating.step.microseconds for rating in ratings])
    alone = [max(rank.compute.microseconds for rank in rating.ranks) for rating in ratings]
    unfitted = [step_us(each.plan, each.workload, each.job, costs) for each in plans]
    made = Predicted(names, plans, {})
    made.by_method[OURS] = fit_host(plans, costs).held_out_us
    made.by_method[AFFINE] = _left_out(np.stack([rated, np.ones_like(rated)], axis=1), made)
    made.by_method[UNFITTED] = np.array(unfitted)
    made.by_method[LOOKUPS] = np.array(alone)
    return made


def _left_out(columns: Floats, plans: Predicted) -> Floats:
    found = np.empty(len(columns))
    for model in np.unique(plans.models):
        own = plans.models == model
        found[own] = columns[own] @ nonnegative_relative(columns[~own], plans.us[~own])
    return found


def scores(kinds: Sequence[Predicted]) -> dict[str, dict[str, float]]:
    """By method, over all kinds together: errors in per cent."""
    us = np.concatenate([kind.us for kind in kinds])
    by_method = {}
    for method in kinds[0].by_method:
        each = np.concatenate([kind.by_method[method] for kind in kinds])
        by_method[method] = {
            "bias": bias_percent(each, us),
            "gmae": gmae_percent(each, us),
            "mape": mape_percent(each, us),
            "p95": float(100 * np.quantile(np.abs(each / us - 1), 0.95)),
        }
    return by_method


def retest_gmae(kinds: Sequence[Predicted]) -> float:
    """How much the medians of the two visits differ, per cent."""
    halves = [_halves(each.us) for kind in kinds for each in kind.measured]
    first, second = np.array(halves).T
    return gmae_percent(first, second)


def _halves(us: Sequence[float]) -> list[float]:
    # Those of the two visits.
    return [float(np.median(half)) for half in np.array_split(np.array(us), 2)]


def lower_mape(kinds: Sequence[Predicted]) -> tuple[float, float, float]:
    """By how much our MAPE is below the affine rating's, a share: low end, it, and high end."""
    models = np.concatenate([kind.models for kind in kinds])
    us = np.concatenate([kind.us for kind in kinds])
    errors = [
        np.abs(np.concatenate([kind.by_method[method] for kind in kinds]) / us - 1)
        for method in (OURS, AFFINE)
    ]
    sums = np.array([[each[models == m].sum() for m in np.unique(models)] for each in errors])
    random = np.random.default_rng(0)
    draws = random.integers(sums.shape[1], size=(_DRAWS, sums.shape[1]))
    ours, affine = (of_method[draws].sum(axis=1) for of_method in sums)
    low, high = np.quantile(1 - ours / affine, [0.025, 0.975])
    return float(low), float(1 - sums[0].sum() / sums[1].sum()), float(high)


def choices(kinds: Sequence[Predicted]) -> dict[str, dict[str, Any]]:
    """By who picks a plan: regret, and how often it is within 10 % of the best.

    The best is picked by one visit's steps, and timed by the other's, both ways.
    """
    pickers: dict[str, Callable[[Predicted, NDArray[np.intp]], int]] = {
        method: lambda kind, of, method=method: int(np.argmin(kind.by_method[method][of]))
        for method in (OURS, AFFINE)
    }
    pickers |= {
        name: lambda kind, of, name=name: next(
            at for at, i in enumerate(of) if name in kind.names[i].split(SAME)
        )
        for name in ("ours 1", "torchrec", *TABLE_III, "row_wise")
    }
    picked: defaultdict[str, list[float]] = defaultdict(list)
    chance = []
    for kind in kinds:
        for model in np.unique(kind.models):
            of = np.flatnonzero(kind.models == model)
            halves = {i: {"halves_ms": _halves(kind.measured[i].us)} for i in of}
            slower = regrets({"plans": halves}, list(of))
            chance.append(np.mean(slower <= NEAR))
            picked["at random, the mean"].append(float(slower.mean()))
            for name, pick in pickers.items():
                picked[name].append(float(slower[pick(kind, of)]))
    found = {}
    for name, each in picked.items():
        near = sum(regret <= NEAR for regret in each)
        low, high = share_interval(near, len(each))
        found[name] = {
            "models": len(each),
            "regret": float(np.mean(each)),
            "near": near,
            "near_low": low,
            "near_high": high,
        }
    found["at random, the mean"]["near"] = float(np.sum(chance))
    return found


def coverage(kinds: Sequence[Predicted]) -> float:
    """Share of measured steps in intervals made from the other models' errors, 9 of 10 wanted."""
    inside, count = 0, 0
    for kind in kinds:
        errors = [
            np.log(each.us) - np.log(us)
            for each, us in zip(kind.measured, kind.by_method[OURS], strict=True)
        ]
        for model in np.unique(kind.models):
            own = kind.models == model
            others = np.concatenate([e for e, mine in zip(errors, own, strict=True) if not mine])
            low, high = np.quantile(others, [0.05, 0.95])
            mine = np.concatenate([e for e, its in zip(errors, own, strict=True) if its])
            inside += int(np.sum((low <= mine) & (mine <= high)))
            count += len(mine)
    return inside / count

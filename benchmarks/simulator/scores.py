"""How well steps and choices of plans are predicted, each model's by what was fitted to the others.

Beside our simulation stand `BASELINES`, as they are and affinely corrected. Intervals are of models
drawn again and again (bootstrap).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torchrec_bls.sharding.calibration.step_models import StepModel
from torchrec_bls.sharding.costs.fitting.accuracy import bias_percent, gmae_percent, mape_percent
from torchrec_bls.sharding.costs.fitting.least_squares import nonnegative_relative
from torchrec_bls.sharding.costs.host_costs import HostCosts
from torchrec_bls.sharding.costs.profiled import ProfiledCosts
from torchrec_bls.sharding.report.prediction import rate
from torchrec_bls.sharding.simulation.fit_host import MeasuredPlan, fit_host
from torchrec_bls.sharding.simulation.one_step import step_us

from benchmarks.harness.statistics import geometric_mean, share_interval
from benchmarks.simulator import baselines
from benchmarks.simulator.sharders import TABLE_III
from benchmarks.simulator.steps import SAME, job_of, model_of, unpacked

Floats = NDArray[np.float64]
OURS, CORRECTED = "simulated", ", affine"
AFFINE = f"planner's rating{CORRECTED}"
BASELINES: dict[str, Callable[[MeasuredPlan, ProfiledCosts], float]] = {
    "planner's rating": lambda each, costs: (
        rate(each.plan, each.workload, each.job, costs).step.microseconds
    ),
    "critical path": lambda each, costs: step_us(each.plan, each.workload, each.job, costs),
    "critical path, no contention": baselines.uncontended_us,
    "sum of kernels": baselines.sum_of_kernels_us,
    "Algorithm 1": baselines.algorithm_1_us,
    "TorchRec's estimator": lambda each, _: baselines.torchrec_us(each, _model(each)),
}
PLANNERS = ("torchrec", *TABLE_III, "row_wise")
#: A choice this much slower than the best one still counts as a success (Table IV).
NEAR = 0.1
_DRAWS = 2000


class Predicted(NamedTuple):
    """Plans of one suite and kind: by method the predicted microseconds of each."""

    names: Sequence[str]
    measured: Sequence[MeasuredPlan]
    by_method: dict[str, Floats]
    host: HostCosts = HostCosts()

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
    fit = fit_host(plans, costs)
    made = Predicted(names, plans, {OURS: fit.held_out_us}, fit.costs)
    for name, predict in BASELINES.items():
        raw = np.array([predict(each, costs) for each in plans])
        made.by_method[name] = raw
        columns = np.stack([raw, np.ones_like(raw)], axis=1)
        made.by_method[name + CORRECTED] = _left_out(columns, made)
    return made


def _model(plan: MeasuredPlan) -> StepModel:
    return model_of(int(plan.model.rpartition(" ")[2]))


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
            **{
                name: float(100 * np.quantile(np.abs(each / us - 1), quantile))
                for name, quantile in (("least", 0), ("p95", 0.95), ("most", 1))
            },
        }
    return by_method


def retest_gmae(kinds: Sequence[Predicted]) -> float:
    """How much the medians of the two visits differ, per cent."""
    halves = [_halves(each) for kind in kinds for each in kind.measured]
    first, second = np.array(halves).T
    return gmae_percent(first, second)


def _halves(plan: MeasuredPlan) -> list[float]:
    # Those of the two visits.
    return [float(np.median(half)) for half in np.array_split(np.array(plan.us), 2)]


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
    """By who picks a plan: regret, and how often it is within 10 % of the best."""
    pickers: dict[str, Callable[[Predicted, NDArray[np.intp]], int]] = {
        method: lambda kind, of, method=method: int(np.argmin(kind.by_method[method][of]))
        for method in (OURS, AFFINE)
    }
    pickers |= {
        name: lambda kind, of, name=name: next(
            at for at, i in enumerate(of) if name in kind.names[i].split(SAME)
        )
        for name in ("ours 1", *PLANNERS)
    }
    picked: defaultdict[str, list[float]] = defaultdict(list)
    chance = []
    for kind, of in _of_models(kinds):
        slower = regrets([kind.measured[i] for i in of])
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


def _of_models(kinds: Sequence[Predicted]) -> Iterator[tuple[Predicted, NDArray[np.intp]]]:
    """The plans of each model, with their kind."""
    for kind in kinds:
        for model in dict.fromkeys(kind.models):
            yield kind, np.flatnonzero(kind.models == model)


def regrets(plans: Sequence[MeasuredPlan]) -> Floats:
    """How much slower than the fastest plan each is, as a share of that one's time.

    The least of several noisy medians is too low. So the fastest is chosen by one visit and its
    time taken from the other, both ways; the mean can be below 0.
    """
    halves = np.array([_halves(plan) for plan in plans]).T
    both = [time / time[chosen.argmin()] - 1 for chosen, time in (halves, halves[::-1])]
    found: Floats = np.mean(both, axis=0)
    return found


def picks(kinds: Sequence[Predicted]) -> dict[str, list[Any]]:
    """Table IV by columns: of each model the sharder of Table III that is simulated fastest, and
    the one that is; `chance` is the share of these sharders that is within 10 % of the fastest."""
    columns: defaultdict[str, list[Any]] = defaultdict(list)
    for kind, every in _of_models(kinds):
        six = [set(kind.names[i].split(SAME)) & set(TABLE_III) for i in every]
        of = every[[bool(names) for names in six]]
        names = [min(each, key=TABLE_III.index) for each in six if each]
        slower, ours, us = (
            regrets([kind.measured[i] for i in of]),
            kind.by_method[OURS][of],
            kind.us[of],
        )
        picked, best = int(ours.argmin()), int(us.argmin())
        job = kind.measured[every[0]].job
        for name, value in (
            ("model", kind.measured[every[0]].model.removeprefix("model ")),
            ("kind", f"{job.backend}, {'training' if job.training else 'inference'}"),
            ("picked", names[picked]),
            ("predicted_us", ours[picked]),
            ("us", us[picked]),
            ("fastest", names[best]),
            ("fastest_us", us[best]),
            ("regret", slower[picked]),
            ("chance", np.mean(slower <= NEAR)),
            ("kernels_us", kind.by_method["sum of kernels"][of][picked]),
        ):
            columns[name].append(value)
    return dict(columns)


def over_ours(kinds: Sequence[Predicted]) -> dict[str, dict[str, tuple[float, float, float]]]:
    """By backend and sharder, its measured step over that of our planner's first plan: low end,
    geometric mean and high end of 95 %."""
    ratios: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for kind, of in _of_models(kinds):
        by_name = {name: kind.us[i] for i in of for name in kind.names[i].split(SAME)}
        for name in PLANNERS:
            of_backend = ratios[kind.measured[of[0]].job.backend]
            of_backend[name].append(by_name[name] / by_name["ours 1"])
    return {
        backend: {name: geometric_mean(each) for name, each in of_backend.items()}
        for backend, of_backend in ratios.items()
    }


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

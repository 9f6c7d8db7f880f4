"""Tables of executed plans and of planning."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchrec_bls.sharding.costs.fitting.accuracy import bias_percent, gmae_percent

from benchmarks.harness import page
from benchmarks.harness.statistics import geometric_mean, share_interval

Record = dict[str, Any]
Models = Sequence[dict[str, Any]]

OURS = "ours"
NEAR = 0.1  # a choice this much slower than the best one still counts as a success (Table IV)


def summarize(raw: Record) -> Record:
    """The record of executed plans: of a plan's steps the median, and those of both halves."""

    def plan(each: dict[str, Any]) -> dict[str, Any]:
        medians = [float(np.median(each["ms"][start::2])) for start in range(2)]
        step = (each["predicted_us"] or {}).get("microseconds")
        ms = float(np.median(each["ms"]))
        return {"ms": ms, "halves_ms": medians, "predicted_us": step}

    results = [
        {**model, "plans": {name: plan(each) for name, each in model["plans"].items()}}
        for model in raw["results"]
    ]
    return {**raw, "results": results}


def section(executed: Record, search: Record) -> str:
    """The planner's page: what plans took, and what planning took."""
    models = _by_backend(executed["results"])
    names = [name for name in models["bls"][0]["plans"] if name != OURS]
    times, faster = [], []
    for name in names:
        cells = {backend: over_ours(each, name) for backend, each in models.items()}
        times.append(
            [name, *(f"{mid:.2f} ({low:.2f}-{high:.2f})" for low, mid, high in cells.values())]
        )
        slower = [backend for backend, (_, mid, _) in cells.items() if mid < 1]
        faster += [f"plans, sharders on {backend}: {name}" for backend in slower]
    sizes = dict.fromkeys((r["tables"], r["ranks"]) for r in search["results"])
    return "\n\n".join(
        [
            f"Training steps of {len(models['bls'])} random models at "
            f"{executed['settings']['ranks']} ranks, over the time under our plans, with 95 % "
            "intervals:",
            page.table(["plans of", *(f"sharders on {backend}" for backend in models)], times),
            page.conditions(executed),
            "Planning on one core: seconds, and the predicted step over a proven lower bound.",
            page.table(
                ["tables x ranks", "ours, s", "over", "TorchRec, s", "over"],
                [_planned(search["results"], *size) for size in sizes],
            ),
            page.conditions(search),
            page.faster_peers(sorted(faster)),
        ]
    )


def details(executed: Record, search: Record) -> str:
    """What docs/reproduction/performance-models.md says of plans."""
    parts = [*executed_tables(executed["results"]), page.conditions(executed)]
    return "\n\n".join([*parts, *search_table(search["results"]), page.conditions(search)])


def executed_tables(results: Models) -> Iterator[str]:
    """Yields for each backend what plans took, how well the fastest was picked, and the bias."""
    for backend, models in _by_backend(results).items():
        names = list(models[0]["plans"])
        shares = np.array([regrets(model, names) for model in models])
        rows = []
        for name, of_plan in zip(names, shares.T, strict=True):
            over = ""
            if name != OURS:
                over = "{1:.3f} ({0:.3f} to {2:.3f})".format(*over_ours(models, name))
            rows.append([name, f"{100 * of_plan.mean():.1f}", _share(of_plan <= NEAR), over])
        header = ["planner", "mean regret, %", "within 10 % of the best", "time over ours (95 %)"]
        yield f"**Executed over {backend}**, {len(models)} random models."
        yield page.table(header, rows)
        yield _picked(models)


def regrets(model: dict[str, Any], names: Sequence[str]) -> list[float]:
    """Returns how much slower than the best plan each is, as a share of the best one's time.

    The least of several noisy medians is too low. So the best one is chosen by one half of the
    steps and its time taken from the other half, both ways; the mean can be below 0.
    """
    halves = np.array([model["plans"][name]["halves_ms"] for name in names]).T
    both = [time / time[chosen.argmin()] - 1 for chosen, time in (halves, halves[::-1])]
    return [float(share) for share in np.mean(both, axis=0)]


def over_ours(models: Models, name: str) -> tuple[float, float, float]:
    """Returns a planner's time over ours: low end, geometric mean and high end of 95 %."""
    return geometric_mean([m["plans"][name]["ms"] / m["plans"][OURS]["ms"] for m in models])


def search_table(results: Models) -> list[str]:
    """Returns planning times, memory and plan quality."""
    names = ("tables", "ranks", "memory", "planner")
    rows, failures = [], []
    for key in dict.fromkeys(tuple(each[name] for name in names) for each in results):
        runs = [each for each in results if tuple(each[name] for name in names) == key]
        tables, ranks, memory, planner = key
        what = f"{tables} x {ranks}"
        failed = [run["failure"] for run in runs if "failure" in run]
        failures += [f"No result: {what}, {memory} memory, {planner}: {each}." for each in failed]
        shares = [
            " ".join(_percent(run.get(share)) for run in runs)
            for share in ("over_bound", "fullest_rank")
        ]
        seconds = " ".join(f"{run['seconds']:.2f}" for run in runs)
        peak = f"{max(run.get('peak_mib', 0) for run in runs):.0f}"
        rows.append([what, memory, planner, seconds, peak, *shares])
    header = ["tables x ranks", "memory", "planner", "seconds", "MiB"]
    header += ["step over the lower bound, %", "fullest rank, %"]
    title = "**Planning**, one core, one figure a problem."
    return [title, page.table(header, rows), *dict.fromkeys(failures)]


def _by_backend(results: Models) -> dict[str, Models]:
    backends = sorted({result["backend"] for result in results})
    return {b: [result for result in results if result["backend"] == b] for b in backends}


def _planned(results: Models, tables: int, ranks: int) -> list[str]:
    row = [f"{tables} x {ranks}"]
    for planner in ("ours", "torchrec"):
        problem = {"tables": tables, "ranks": ranks, "planner": planner}
        runs = [run for run in results if problem.items() <= run.items()]
        over = [100 * run["over_bound"] for run in runs if "over_bound" in run]
        row.append(_range([run["seconds"] for run in runs]))
        row.append(f"{_range(over)} %" if over else "")
        row[-1] += f" ({len(runs) - len(over)} of {len(runs)} none)" * (len(over) < len(runs))
    return row


def _picked(models: Models) -> str:
    """Returns how well predictions pick among the plans that were tried (the paper's Table IV)."""
    picked, predicted, measured = [], [], []
    for model in models:
        plans = {name: plan for name, plan in model["plans"].items() if plan["predicted_us"]}
        times = [plan["predicted_us"] / 1e3 for plan in plans.values()]
        picked.append(regrets(model, list(plans))[int(np.argmin(times))])
        predicted += times
        measured += [plan["ms"] for plan in plans.values()]
    both = np.array(predicted), np.array(measured)
    return (
        f"The plan that predictions rate fastest: within 10 % of the fastest in "
        f"{_share(np.array(picked) <= NEAR)}, mean regret {100 * np.mean(picked):.1f} %. Steps "
        f"themselves: error (GMAE) {gmae_percent(*both):.0f} %, signed bias "
        f"{bias_percent(*both):+.0f} %."
    )


def _range(numbers: Sequence[float]) -> str:
    low, high = (f"{each:.1f}" for each in (min(numbers), max(numbers)))
    return low if low == high else f"{low}-{high}"


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.1f}"


def _share(hits: NDArray[np.bool_]) -> str:
    successes, trials = int(hits.sum()), len(hits)
    low, high = share_interval(successes, trials)
    return f"{successes} of {trials} ({100 * low:.0f} to {100 * high:.0f} %)"

"""Tables of cost models, of executed plans and of planning."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchrec_bls.sharding.costs.fitting.accuracy import bias_percent, gmae_percent

from benchmarks.harness import page
from benchmarks.harness.statistics import geometric_mean, share_interval

Record = dict[str, Any]
Results = Sequence[dict[str, Any]]

OURS = "ours"
NEAR = 0.1  # a choice this much slower than the best one still counts as a success (Table IV)
OUR_MODEL = "analytic x trees, unique rows (ours)"
OUR_MODEL_WITH_FACTORS = "analytic x trees, reuse factors (ours)"

# What we want at most, per cent; of the bias on either side.
_BARS = {
    "forward": {"GMAE": 7.0, "MAPE": 11.5, "bias": 3.0},
    "backward": {"GMAE": 6.5, "MAPE": 10.0, "bias": 3.0},
    "between": {"GMAE": 12.0},
    "uneven": {"GMAE": 16.0},
}
# Of the models that are there, the first one is ours. The ordinary fit is of absolute errors.
_HELD = (OUR_MODEL, "kept", "kept, largest rank")
_NO_PEERS = (*_HELD, OUR_MODEL_WITH_FACTORS, "alpha-beta, ordinary")
_CURVES = ("kept", "kept, largest rank", "alpha-beta, relative", "alpha-beta, ordinary")


def summarize(raw: Record) -> Record:
    """The record of executed plans: of a plan's steps the median, and those of both halves."""

    def plan(ms: list[float], predicted_us: dict[str, float] | None, **_: Any) -> dict[str, Any]:
        halves = [np.median(ms[start::2]) for start in range(2)]
        step = predicted_us and predicted_us["microseconds"]
        return {"ms": np.median(ms), "halves_ms": halves, "predicted_us": step}

    results = [
        {**model, "plans": {name: plan(**each) for name, each in model["plans"].items()}}
        for model in raw["results"]
    ]
    return {**raw, "results": results}


def section(executed: Record, search: Record) -> str:
    """The planner's page: what plans took, and what planning took."""
    backends = _grouped(executed["results"], "backend")
    times, faster = [], []
    for name in (name for name in backends["bls"][0]["plans"] if name != OURS):
        times.append([name])
        for backend, models in backends.items():
            low, middle, high = over_ours(models, name)
            times[-1].append(f"{middle:.2f} ({low:.2f}-{high:.2f})")
            if middle < 1:
                faster.append(f"plans, sharders on {backend}: {name}")
    planned: dict[str, list[str]] = {}
    for key, runs in _grouped(search["results"], "tables", "ranks", "planner").items():
        size = "{} x {}".format(*key)
        planned.setdefault(size, [size]).extend(_planned(runs))
    header = ["tables x ranks", "ours, s", "over", "TorchRec, s", "over"]
    of_executed = page.section(
        executed,
        f"Training steps of {len(backends['bls'])} random models at"
        f" {executed['settings']['ranks']} ranks, over the time under our plans, with 95 %"
        " intervals:",
        page.table(["plans of", *(f"sharders on {backend}" for backend in backends)], times),
    )
    of_search = page.section(
        search,
        "Planning on one core: seconds, and the predicted step over a proven lower bound.",
        page.table(header, planned.values()),
        faster=sorted(faster),
    )
    return f"{of_executed}\n\n{of_search}"


def executed_tables(results: Results) -> Iterator[str]:
    """Yields for each backend what plans took, how well the fastest was picked, and the bias."""
    header = ["planner", "mean regret, %", "within 10 % of the best", "time over ours (95 %)"]
    for backend, models in _grouped(results, "backend").items():
        names = list(models[0]["plans"])
        shares = np.array([regrets(model, names) for model in models])
        rows = []
        for name, of_plan in zip(names, shares.T, strict=True):
            over = "{1:.3f} ({0:.3f} to {2:.3f})".format(*over_ours(models, name))
            mean = f"{100 * of_plan.mean():.1f}"
            rows.append([name, mean, _share(of_plan <= NEAR), over if name != OURS else ""])
        yield f"**Executed over {backend}**, {len(models)} random models."
        yield page.table(header, rows)
        yield _picked(models)


def regrets(model: dict[str, Any], names: Sequence[str]) -> NDArray[np.float64]:
    """How much slower than the best plan each is, as a share of the best one's time.

    The least of several noisy medians is too low. So the best one is chosen by one half of the
    steps and its time taken from the other half, both ways; the mean can be below 0.
    """
    halves = np.array([model["plans"][name]["halves_ms"] for name in names]).T
    both = [time / time[chosen.argmin()] - 1 for chosen, time in (halves, halves[::-1])]
    return np.mean(both, axis=0)


def over_ours(models: Results, name: str) -> tuple[float, float, float]:
    """A planner's time over ours: low end, geometric mean and high end of 95 %."""
    return geometric_mean([m["plans"][name]["ms"] / m["plans"][OURS]["ms"] for m in models])


def search_table(search: Record) -> str:
    """Planning times, memory and plan quality."""
    rows, failures = [], []
    problems = _grouped(search["results"], "tables", "ranks", "memory", "planner")
    for (tables, ranks, memory, planner), runs in problems.items():
        what = f"{tables} x {ranks}"
        failed = [run["failure"] for run in runs if "failure" in run]
        failures += [f"No result: {what}, {memory} memory, {planner}: {each}." for each in failed]
        seconds = " ".join(f"{run['seconds']:.2f}" for run in runs)
        peak = f"{max(run.get('peak_mib', 0) for run in runs):.0f}"
        shares = [
            " ".join(f"{100 * run[share]:.1f}" if share in run else "none" for run in runs)
            for share in ("over_bound", "fullest_rank")
        ]
        rows.append([what, memory, planner, seconds, peak, *shares])
    header = ["tables x ranks", "memory", "planner", "seconds", "MiB"]
    header += ["step over the lower bound, %", "fullest rank, %"]
    title = "**Planning**, one core, one figure a problem."
    return "\n\n".join([title, page.table(header, rows), *dict.fromkeys(failures)])


def _grouped(results: Results, *names: str) -> dict[Any, Results]:
    """The results by what they have under `names`, in order of the first one."""
    groups = defaultdict(list)
    for result in sorted(results, key=itemgetter(names[0])):
        groups[itemgetter(*names)(result)].append(result)
    return groups


def _planned(runs: Results) -> list[str]:
    """The seconds that a planner took, and the steps of its plans over the bound."""
    over = [100 * run["over_bound"] for run in runs if "over_bound" in run]
    steps = f"{_range(over)} %" if over else ""
    if len(over) < len(runs):
        steps += f" ({len(runs) - len(over)} of {len(runs)} none)"
    return [_range([run["seconds"] for run in runs]), steps]


def _picked(models: Results) -> str:
    """How well predictions pick among the plans that were tried (the paper's Table IV)."""
    picked, steps = [], []
    for model in models:
        plans = {name: plan for name, plan in model["plans"].items() if plan["predicted_us"]}
        both = np.array([(plan["predicted_us"] / 1e3, plan["ms"]) for plan in plans.values()])
        picked.append(regrets(model, list(plans))[both[:, 0].argmin()])
        steps.append(both)
    predicted, measured = np.concatenate(steps).T
    return (
        f"The plan that predictions rate fastest: within 10 % of the fastest in "
        f"{_share(np.array(picked) <= NEAR)}, mean regret {100 * np.mean(picked):.1f} %. Steps "
        f"themselves: error (GMAE) {gmae_percent(predicted, measured):.0f} %, signed bias "
        f"{bias_percent(predicted, measured):+.0f} %."
    )


def _range(numbers: Sequence[float]) -> str:
    low, high = f"{min(numbers):.1f}", f"{max(numbers):.1f}"
    return low if low == high else f"{low}-{high}"


def _share(hits: NDArray[np.bool_]) -> str:
    low, high = share_interval(int(hits.sum()), len(hits))
    return f"{hits.sum()} of {len(hits)} ({100 * low:.0f} to {100 * high:.0f} %)"


def models_section(record: dict[str, Any]) -> str:
    """What docs/reproduction/performance-models.md says of lookups and collectives."""
    results, machine = record["results"], record["results"]["machine"]
    curves, overall = results["collectives"]["by_curve"], results["collectives"]["all"]
    header = ["operation", "messages", "curve", "fitted imbalance", "largest rank"]
    header += ["alpha-beta, relative", "ordinary", "retest"]
    rows = []
    for name, each in curves.items():
        models = each["models"]
        scores = [_score(models[model]) if model in models else "" for model in _CURVES]
        rows.append([name, str(each["messages"]), each["curve"], *scores, _retest(each)])
    totals = ["all of these, by what a profile holds", "GMAE / MAPE / signed bias"]
    missed = [f"- {each}." for each in _missed(results["lookups"] | curves)] or ["- None."]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    parts = [
        *_lookups(results["lookups"]),
        "**Collectives** at sizes that nothing was fitted to; GMAE / MAPE / signed bias in per"
        " cent.",
        page.table(header, rows),
        page.table(totals, [[name, _score(each)] for name, each in overall.items()]),
        "**Bars that these figures miss:**",
        "\n".join(missed),
        f"Measured on {machine['cpu']}, {machine['cores']} cores,"
        f" {machine['memory_bytes'] / 2**30:.0f} GiB; {versions}; optimizer"
        f" {record['settings']['optimizer']}. Time of a lookup: {results['lookup_time']} of its"
        " repeats.",
    ]
    # Messages whose sizes are between those that double are the even ones.
    return "\n\n".join(parts).replace(", between", ", even")


def _lookups(lookups: dict[str, Any]) -> Iterator[str]:
    for kind in ("pooled", "unpooled"):
        both = [lookups[f"{kind} {direction}"] for direction in ("forward", "backward")]
        names = both[0]["models"]
        rows = [[name, *(_score(each["models"][name]) for each in both)] for name in names]
        rows.append(["retest floor (GMAE)", *map(_retest, both)])
        cover = " and ".join(f"{100 * each['interval_coverage']:.0f} %" for each in both)
        yield (
            f"**{kind.capitalize()} lookups**, {both[0]['ops']} configurations, {kind}; GMAE / MAPE"
            " / signed bias in per cent, means of six splits."
        )
        yield page.table(["model", "forward", "backward"], rows)
        yield f"Held-out measurements within our interval (90 % is aimed at): {cover}."


def _missed(results: dict[str, Any]) -> Iterator[str]:
    """Every bar that these results miss, and every peer that is better than ours, by how much."""
    for what, result in results.items():
        models = result["models"]
        ours = next(models[name] for name in _HELD if name in models)
        for title, bar in _BARS[what.split()[-1]].items():
            name = f"{title.lower()}_percent"
            figure = f"{what}: {title} {ours[name]:.1f} %"
            if abs(ours[name]) > bar:
                yield f"{figure}, wanted {bar:g}"
            for peer, scores in models.items():
                if title != "bias" and peer not in _NO_PEERS and scores[name] < ours[name]:
                    yield f"{figure}, and that of '{peer}' is {scores[name]:.1f}"


def _score(scores: dict[str, Any]) -> str:
    values = (scores[f"{name}_percent"] for name in ("gmae", "mape", "bias"))
    return "{:.1f} / {:.1f} / {:+.1f}".format(*values)


def _retest(result: dict[str, Any]) -> str:
    floor = result["retest_gmae_percent"]
    return "-" if floor is None else f"{floor:.1f}"

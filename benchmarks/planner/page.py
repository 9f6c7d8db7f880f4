"""Tables of cost models, of others' plans and of planning."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

from benchmarks.harness import page
from benchmarks.simulator.page import faster_planners, planners_table

Record = dict[str, Any]
Results = Sequence[dict[str, Any]]

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


def section(simulator: Record, search: Record) -> str:
    """The planner's page: what plans took, and what planning took."""
    planned: dict[str, list[str]] = {}
    for key, runs in _grouped(search["results"], "tables", "ranks", "planner").items():
        size = "{} x {}".format(*key)
        planned.setdefault(size, [size]).extend(_planned(runs))
    header = ["tables x ranks", "ours, s", "over", "TorchRec, s", "over"]
    of_steps = page.section(
        simulator,
        "Steps of random models, training and inference, over those under our planner's plans, "
        "with 95 % intervals:",
        planners_table(simulator["results"]),
    )
    of_search = page.section(
        search,
        "Planning on one core: seconds, and the predicted step over a proven lower bound.",
        page.table(header, planned.values()),
        faster=sorted(faster_planners(simulator["results"])),
    )
    return f"{of_steps}\n\n{of_search}"


def search_section(search: Record) -> str:
    """Planning times, memory and plan quality, with their conditions."""
    return page.section(search, search_table(search))


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


def _range(numbers: Sequence[float]) -> str:
    low, high = f"{min(numbers):.1f}", f"{max(numbers):.1f}"
    return low if low == high else f"{low}-{high}"


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

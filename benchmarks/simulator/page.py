"""Tables and the figure of the study of simulated steps."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import page
from benchmarks.harness.statistics import share_interval
from benchmarks.simulator.scores import AFFINE, NEAR, OURS, PLANNERS
from benchmarks.simulator.workloads import EXCHANGES, HOST, IDLE, LOOKUPS

Record = dict[str, Any]

_SUITES = {"A": "2 ranks with a core each", "B": "4 ranks on 2 cores"}
#: The suite whose threads are drawn.
DRAWN = "A"
_ERRORS = ("bias", "gmae", "mape", "p95")
# Of the paper: overall, 4 x GV100 and 4 x A100; geometric mean, least and greatest.
_TABLE_II = {
    "paper, 4 x GV100": (5.60, 0.27, 19.38),
    "paper, 4 x A100": (4.85, 0.05, 17.87),
    "paper, both": (5.21, 0.05, 19.38),
}
_COLORS = {
    LOOKUPS: "tab:blue",
    EXCHANGES: "tab:orange",
    HOST: "tab:gray",
    IDLE: "0.92",
}


def steps_section(run: Record) -> str:
    """Errors, choices and picks of each suite."""
    parts = [_table_ii(run["results"])]
    for suite, of_suite in run["results"].items():
        parts += _errors(suite, of_suite)
        parts += _choices(of_suite)
        parts += _table_iv(suite, of_suite["picks"])
    return page.section(run, *parts)


def _table_ii(results: Record) -> str:
    rows = [[name, *(f"{error:.2f}" for error in errors)] for name, errors in _TABLE_II.items()]
    for suite, of_suite in results.items():
        errors = (of_suite["scores"][OURS][name] for name in ("gmae", "least", "most"))
        rows.append([f"suite {suite}, {_SUITES[suite]}", *(f"{error:.2f}" for error in errors)])
    header = ["absolute error of a step, %", "geometric mean", "least", "greatest"]
    return f"### Table II\n\n{page.table(header, rows)}"


def _errors(suite: str, of_suite: Record) -> list[str]:
    low, lower, high = of_suite["lower_mape"]
    named = [*of_suite["scores"].items()]
    named += [(f"{OURS}: {kind}", of) for kind, of in of_suite["by_kind"].items()]
    rows = [
        [
            name.replace("Algorithm 1", "Algorithm 1 without T1-T5"),
            *(f"{each[error]:.1f}" for error in _ERRORS),
        ]
        for name, each in named
    ]
    return [
        f"### Suite {suite}: {_SUITES[suite]}",
        f"{of_suite['models']} models, {of_suite['plans']} plans. Medians of the two visits differ "
        f"by {of_suite['retest_gmae']:.1f} % (GMAE).",
        page.table(["predicted by", "bias, %", "GMAE, %", "MAPE, %", "95th percentile, %"], rows),
        f"MAPE is lower than that of the {AFFINE} correction by {100 * lower:.0f} % "
        f"({100 * low:.0f} to {100 * high:.0f}). Intervals for 9 of 10 steps hold "
        f"{100 * of_suite['coverage']:.0f} %.",
    ]


def _choices(of_suite: Record) -> list[str]:
    header = ["plan picked by", "models", "within 10 % of the best", "mean regret, %"]
    rows = [
        [name, each["models"], _share(each["near"], each), f"{100 * each['regret']:.1f}"]
        for name, each in of_suite["choices"].items()
    ]
    return [page.table(header, rows)]


def _share(near: float, each: Record) -> str:
    return f"{near:.0f} ({100 * each['near_low']:.0f} to {100 * each['near_high']:.0f} %)"


def _table_iv(suite: str, columns: dict[str, list[Any]]) -> list[str]:
    picks = _rows(columns)
    near = sum(each["regret"] <= NEAR for each in picks)
    chance = sum(each["chance"] for each in picks)
    low, high = share_interval(near, len(picks))
    signed = [100 * (each["predicted_us"] / each["us"] - 1) for each in picks]
    rows = [
        [
            each["model"],
            each["kind"],
            each["picked"],
            f"{each['predicted_us'] / 1e3:.2f}",
            f"{each['us'] / 1e3:.2f}",
            f"{error:+.1f}",
            each["fastest"],
            f"{each['fastest_us'] / 1e3:.2f}",
            f"{100 * each['regret']:.1f}",
        ]
        for each, error in zip(picks, signed, strict=True)
    ]
    header = ["model", "steps", "fastest (P)", "P, ms", "AP, ms", "error, %", "fastest (A)"]
    header += ["A, ms", "regret, %"]
    return [
        f"**Table IV, suite {suite}**, the six sharders of Table III: P predicted, A actual, AP "
        "actual of what is predicted fastest. A pick at random is within 10 % of the fastest in "
        f"{chance:.0f} of {len(picks)} ({100 * chance / len(picks):.0f} %), the simulation's in "
        f"{near} ({100 * low:.0f} to {100 * high:.0f} %). Signed error {np.mean(signed):+.1f} % "
        "on average.",
        page.table(header, rows),
    ]


def _rows(columns: dict[str, list[Any]]) -> list[Record]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def planners_table(results: Record) -> str:
    """Measured steps of others' plans over those of our planner's first plan."""
    columns = [
        (suite, backend) for suite in results for backend in sorted(results[suite]["over_ours"])
    ]
    rows = []
    for name in PLANNERS:
        each = [results[suite]["over_ours"][backend][name] for suite, backend in columns]
        rows.append([name, *("{1:.2f} ({0:.2f}-{2:.2f})".format(*ratio) for ratio in each)])
    header = [f"{backend}, {_SUITES[suite]}" for suite, backend in columns]
    return page.table(["plans of", *header], rows)


def faster_planners(results: Record) -> list[str]:
    """Whose steps are shorter than our planner's on average, and where."""
    return [
        f"plans, {backend}, {_SUITES[suite]}: {name}"
        for suite, of_suite in results.items()
        for backend, of_backend in of_suite["over_ours"].items()
        for name, (_, ratio, _) in of_backend.items()
        if ratio < 1
    ]


def draw(path: Path, steps: Record, lag: Record, transformers: Record) -> None:
    """Figures 2, 5, 10 and 11 of the paper, and Figure 7 of the bounded-lag paper."""
    suites = steps["results"]
    with page.figure(path, 13, 4 + 3.4 * len(suites), nrows=len(suites) + 2, ncols=2) as (_, axes):
        _draw_shares(axes[0, 0], suites[DRAWN]["workloads"])
        _draw_timeline(axes[0, 1], suites[DRAWN]["workloads"]["gloo, training"]["timeline"])
        for row, (suite, of_suite) in enumerate(suites.items(), 1):
            for axis, backend in zip(axes[row], ("bls", "gloo"), strict=True):
                picks = [p for p in _rows(of_suite["picks"]) if p["kind"].startswith(backend)]
                _draw_steps(axis, picks, f"Figure 10: {_SUITES[suite]}, {backend}")
        _draw_transformers(axes[-1, 0], transformers["results"])
        _draw_bounds(axes[-1, 1], lag["results"]["figure_7"])


def _draw_shares(axis: Any, workloads: Record) -> None:
    labels, lefts = [], []
    for kind, of_kind in workloads.items():
        for name, threads in of_kind["shares"].items():
            for thread, shares in threads.items():
                total = sum(shares.values())
                labels.append(f"{kind}, {name}: {thread} ({total / 1e3:.1f} ms)")
                lefts.append({what: 100 * us / total for what, us in shares.items()})
    left = np.zeros(len(labels))
    for what, color in _COLORS.items():
        widths = np.array([each[what] for each in lefts])
        axis.barh(range(len(labels)), widths, left=left, color=color, label=what)
        left += widths
    axis.set_yticks(range(len(labels)), labels, fontsize=6)
    axis.invert_yaxis()
    axis.set(xlabel="% of a simulated step", title="Figure 2: what threads of rank 0 do")
    axis.legend(fontsize=7)


def _draw_timeline(axis: Any, tasks: list[tuple[int, str, float, float]]) -> None:
    threads = max(thread for thread, *_ in tasks) + 1
    names = [f"{name} {rank}" for name in ("main", "comm.") for rank in range(threads // 2)]
    for what, color in _COLORS.items():
        for thread, category, start, end in tasks:
            if category == what:
                axis.barh(thread, end - start, left=start, color=color, edgecolor="white")
    axis.set_yticks(range(threads), names, fontsize=7)
    axis.invert_yaxis()
    axis.set(xlabel="µs", title="Figure 5: exchanges begin and end together (gloo, training)")


def _draw_steps(axis: Any, picks: list[Record], title: str) -> None:
    picks = sorted(picks, key=lambda each: float(each["us"]))
    places = np.arange(len(picks))
    for offset, (label, name, color) in enumerate(
        (
            ("measured", "us", "0.4"),
            ("simulated", "predicted_us", "tab:blue"),
            ("sum of kernels", "kernels_us", "tab:red"),
        )
    ):
        heights = [each[name] / 1e3 for each in picks]
        axis.bar(places + 0.27 * (offset - 1), heights, 0.27, label=label, color=color)
    axis.set_xticks(places, [each["model"] for each in picks], fontsize=6)
    axis.set(xlabel="model", ylabel="ms a step", title=title, yscale="log")
    axis.legend(fontsize=7)


def _draw_transformers(axis: Any, results: list[Record]) -> None:
    looks = {"simulated": "o", "no contention": "x", "sum of kernels": "+"}
    most = max(each["ms"]["median"] for each in results)
    for name, marker in looks.items():
        for suite, color in (("A", "tab:blue"), ("B", "tab:orange")):
            of_suite = [each for each in results if each["suite"] == suite]
            measured = [each["ms"]["median"] for each in of_suite]
            predicted = [each["predicted_ms"][name] for each in of_suite]
            axis.plot(measured, predicted, marker, color=color, label=f"{_SUITES[suite]}, {name}")
    axis.plot([0, most], [0, most], "k:", linewidth=1)
    axis.set(xlabel="measured, ms", ylabel="predicted, ms", title="Figure 11: transformers")
    axis.legend(fontsize=6)


def _draw_bounds(axis: Any, results: list[Record]) -> None:
    for ranks, color in ((4, "tab:blue"), (8, "tab:orange")):
        own = [each for each in results if each["ranks"] == ranks]
        bounds = [str(each["bound"]) for each in own]
        means = [each["measured_ms"]["mean"] for each in own]
        errors = [each["measured_ms"]["ci95"] for each in own]
        axis.errorbar(bounds, means, errors, color=color, marker="o", label=f"{ranks}, measured")
        simulated = [each["simulated_ms"] for each in own]
        axis.plot(bounds, simulated, "--", color=color, marker="x", label=f"{ranks}, simulated")
    axis.set_ylim(bottom=0)
    axis.set(xlabel="bound k", ylabel="ms a step", title="BLS paper, Figure 7: delays 0-10 ms")
    axis.legend(fontsize=7, title="ranks", title_fontsize=7)

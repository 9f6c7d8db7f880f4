"""The section "Sharding" of docs/reproduction/performance-models.md, from the records of
sharding_executed.py and sharding_search.py."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT
from numpy.typing import NDArray
from torchrec_bls.sharding.costs.fitting.accuracy import bias_percent, gmae_percent

Floats = NDArray[np.float64]

BEGIN = "<!-- sharding: written by benchmarks/sharding_report.py -->"
END = "<!-- end of sharding -->"
OURS = "ours"
NEAR = 0.1  # a choice this much slower than the best one still counts as a success (Table IV)
_Z = 1.96


def main() -> int:
    """Prints the section, and writes it into a page if there is one."""
    results = ROOT / "benchmarks" / "results"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executed", type=Path, default=results / "sharding_executed.json")
    parser.add_argument("--search", type=Path, default=results / "sharding_search.json")
    parser.add_argument("--page", type=Path, help="a page to write the section into")
    arguments = parser.parse_args()
    try:
        executed = json.loads(arguments.executed.read_text())
        search = json.loads(arguments.search.read_text())
        text = "\n\n".join(
            [
                *executed_tables(executed["results"]),
                _origin(executed),
                *search_table(search["results"]),
                _origin(search),
            ]
        )
        if arguments.page is not None:
            _write(arguments.page, text)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(text)
    return 0


def _write(page: Path, text: str) -> None:
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} needs the lines {BEGIN} and {END}, in this order")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def executed_tables(results: Sequence[dict[str, Any]]) -> list[str]:
    """Returns for each backend what plans took, how well the fastest was picked, and the bias."""
    parts = []
    for backend in sorted({result["backend"] for result in results}):
        models = [result for result in results if result["backend"] == backend]
        names = list(models[0]["plans"])
        table = np.array([regrets(model, names) for model in models])
        lines = [
            f"**Executed over {backend}**, {len(models)} random models.",
            "",
            "| planner | mean regret, % | within 10 % of the best | time over ours (95 %) |",
            "|---|---|---|---|",
        ]
        for column, name in enumerate(names):
            over = (
                ""
                if name == OURS
                else "{1:.3f} ({0:.3f} to {2:.3f})".format(*over_ours(models, name))
            )
            lines.append(
                f"| {name} | {100 * table[:, column].mean():.1f} "
                f"| {_share(table[:, column] <= NEAR)} | {over} |"
            )
        parts.append("\n".join(lines))
        parts.append(_picked(models))
    return parts


def regrets(model: dict[str, Any], names: Sequence[str]) -> list[float]:
    """Returns how much slower than the best plan each is, as a share of the best one's time.

    The least of several noisy medians is too low. So the best one is chosen by one half of the
    steps and its time taken from the other half, both ways; the mean can be below 0.
    """
    steps = np.array([model["plans"][name]["ms"] for name in names])
    halves = [np.median(steps[:, start::2], axis=1) for start in range(2)]
    both = [time / time[chosen.argmin()] - 1 for chosen, time in (halves, halves[::-1])]
    return [float(share) for share in np.mean(both, axis=0)]


def over_ours(models: Sequence[dict[str, Any]], name: str) -> tuple[float, float, float]:
    """Returns a planner's time over ours: low end, geometric mean and high end of 95 %."""
    logs = np.log([_median(model, name) / _median(model, OURS) for model in models])
    half = _Z * logs.std(ddof=1) / math.sqrt(len(logs))
    low, mean, high = np.exp([logs.mean() - half, logs.mean(), logs.mean() + half])
    return float(low), float(mean), float(high)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a share."""
    share, spread = successes / trials, _Z * _Z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(share * (1 - share) / trials + spread / trials / 4) / (1 + spread)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def search_table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Returns planning times, memory and plan quality."""
    lines = [
        "**Planning**, one core, one figure a problem.",
        "",
        "| tables x ranks | memory | planner | seconds | MiB | step over the lower bound, % "
        "| fullest rank, % |",
        "|---|---|---|---|---|---|---|",
    ]
    names = ("tables", "ranks", "memory", "planner")
    failures = []
    for key in dict.fromkeys(tuple(each[name] for name in names) for each in results):
        runs = [each for each in results if tuple(each[name] for name in names) == key]
        tables, ranks, memory, planner = key
        failures += [
            f"{tables} x {ranks}, {memory} memory, {planner}: {run['failure']}"
            for run in runs
            if "failure" in run
        ]
        cells = [
            f"{tables} x {ranks}",
            memory,
            planner,
            " ".join(f"{run['seconds']:.2f}" for run in runs),
            f"{max(run.get('peak_mib', 0) for run in runs):.0f}",
            " ".join(_percent(run.get("over_bound")) for run in runs),
            " ".join(_percent(run.get("fullest_rank")) for run in runs),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return ["\n".join(lines), *(f"No result: {each}." for each in dict.fromkeys(failures))]


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.1f}"


def _median(model: dict[str, Any], name: str) -> float:
    return float(np.median(model["plans"][name]["ms"]))


def _picked(models: Sequence[dict[str, Any]]) -> str:
    """Returns how well predictions pick among the plans that were tried (the paper's Table IV)."""
    picked, predicted, measured = [], [], []
    for model in models:
        rated = {
            name: plan["predicted_us"]["microseconds"] / 1e3
            for name, plan in model["plans"].items()
            if plan["predicted_us"]
        }
        names = list(rated)
        picked.append(regrets(model, names)[int(np.argmin(list(rated.values())))])
        predicted.extend(rated.values())
        measured.extend(_median(model, name) for name in names)
    success = _share(np.array(picked) <= NEAR)
    times, truth = np.array(predicted), np.array(measured)
    return (
        f"The plan that predictions rate fastest: within 10 % of the fastest in {success}, "
        f"mean regret {100 * np.mean(picked):.1f} %. Steps themselves: error (GMAE) "
        f"{gmae_percent(times, truth):.0f} %, signed bias {bias_percent(times, truth):+.0f} %."
    )


def _origin(record: dict[str, Any]) -> str:
    where = record["environment"]
    return (
        f"*{where['cpu']}, {where['cores']} cores, load {where['load_average']} before the run, "
        f"Linux {where['kernel']}, torch {where['versions']['torch']}, torchrec "
        f"{where['versions']['torchrec']}, commit {where['commit']}, {where['date'][:10]}: "
        f"`{where['command']}`*"
    )


def _share(hits: NDArray[np.bool_]) -> str:
    successes, trials = int(hits.sum()), len(hits)
    low, high = wilson(successes, trials)
    return f"{successes} of {trials} ({100 * low:.0f} to {100 * high:.0f} %)"


if __name__ == "__main__":
    raise SystemExit(main())

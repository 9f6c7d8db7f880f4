"""Scores of simulated steps and of the plans that they choose, from measured steps.

It reads what `python -m benchmarks.simulator.steps` has measured, and fits everything anew without
the model that it predicts.
"""

from pathlib import Path
from typing import Any

from torchrec_bls.sharding.costs.profile import load_profile
from torchrec_bls.sharding.costs.profiled import ProfiledCosts

from benchmarks.harness import page, record
from benchmarks.simulator.scores import (
    AFFINE,
    OURS,
    choices,
    coverage,
    lower_mape,
    measured_plans,
    predicted,
    retest_gmae,
    scores,
)
from benchmarks.simulator.steps import SUITES

_SUITES = {"A": "2 ranks with a core each", "B": "4 ranks on 2 cores"}


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--steps", type=Path, default=Path("out/simulator_steps.json"))
    options = parser.parse_args()
    before = record.environment()
    samples = record.raw_path(options.steps)
    if not samples.exists():
        raise record.RecordError(f"{samples} is missing: run python -m benchmarks.simulator.steps")
    raw = record.read_raw(samples)
    costs = ProfiledCosts(load_profile(raw["settings"]["profile"]))
    measured_in = {name: raw["environment"][name] for name in ("commit", "date")}
    results = {
        suite: _of_suite(raw, suite, costs)
        for suite in SUITES
        if any(each["suite"] == suite for each in raw["results"])
    }
    settings = {**raw["settings"], "measured": measured_in}
    record.publish(options.json, "simulator", before, settings, results, section)


def _of_suite(raw: dict[str, Any], suite: str, costs: ProfiledCosts) -> dict[str, Any]:
    kinds = {
        kind: predicted(names, plans, costs)
        for kind, (names, plans) in measured_plans(raw, suite).items()
    }
    every = list(kinds.values())
    return {
        "models": sum(len(set(kind.models)) for kind in every),
        "plans": sum(len(kind.names) for kind in every),
        "scores": scores(every),
        "by_kind": {name: scores([kind])[OURS] for name, kind in kinds.items()},
        "retest_gmae": retest_gmae(every),
        "lower_mape": lower_mape(every),
        "coverage": coverage(every),
        "choices": choices(every),
    }


def section(run: dict[str, Any]) -> str:
    """Errors and choices of each suite."""
    parts = []
    for suite, of_suite in run["results"].items():
        low, lower, high = of_suite["lower_mape"]
        parts += [
            f"**Suite {suite}**, {_SUITES[suite]}: {of_suite['models']} models, "
            f"{of_suite['plans']} plans. Medians of the two visits differ by "
            f"{of_suite['retest_gmae']:.1f} % (GMAE).",
            page.table(
                ["predicted by", "bias, %", "GMAE, %", "MAPE, %", "95th percentile, %"],
                [
                    [name, *(f"{each[error]:.1f}" for error in ("bias", "gmae", "mape", "p95"))]
                    for name, each in [
                        *of_suite["scores"].items(),
                        *((f"{OURS}: {kind}", of) for kind, of in of_suite["by_kind"].items()),
                    ]
                ],
            ),
            f"MAPE is lower than that of the {AFFINE} by {100 * lower:.0f} % ({100 * low:.0f} to "
            f"{100 * high:.0f}). Intervals for 9 of 10 steps hold "
            f"{100 * of_suite['coverage']:.0f} %.",
            page.table(
                ["plan picked by", "models", "within 10 % of the best", "mean regret, %"],
                [
                    [
                        name,
                        each["models"],
                        f"{each['near']:.0f} ({100 * each['near_low']:.0f} to "
                        f"{100 * each['near_high']:.0f} %)",
                        f"{100 * each['regret']:.1f}",
                    ]
                    for name, each in of_suite["choices"].items()
                ],
            ),
        ]
    return page.section(run, *parts)


if __name__ == "__main__":
    main()

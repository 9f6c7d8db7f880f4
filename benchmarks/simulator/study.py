"""Scores of simulated steps and of the plans that they choose, from measured steps.

It reads what `python -m benchmarks.simulator.steps` has measured, and fits everything anew without
the model that it predicts.
"""

import logging
from pathlib import Path
from typing import Any

from torchrec_bls.sharding.costs.profile import load_profile
from torchrec_bls.sharding.costs.profiled import ProfiledCosts

from benchmarks.harness import record
from benchmarks.simulator.page import DRAWN, steps_section
from benchmarks.simulator.scores import (
    OURS,
    choices,
    coverage,
    lower_mape,
    measured_plans,
    over_ours,
    picks,
    predicted,
    retest_gmae,
    scores,
)
from benchmarks.simulator.steps import SUITES
from benchmarks.simulator.workloads import heavy_and_light


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--steps", type=Path, default=Path("out/simulator_steps.json"))
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    before = record.environment()
    samples = record.raw_path(options.steps)
    if not samples.exists():
        raise record.RecordError(f"{samples} is missing: run python -m benchmarks.simulator.steps")
    raw = record.read_raw(samples)
    costs = ProfiledCosts(load_profile(raw["settings"]["profile"]))
    measured_in = {name: raw["environment"][name] for name in ("commit", "date")}
    results = {
        suite: of_suite(raw, suite, costs)
        for suite in SUITES
        if any(each["suite"] == suite for each in raw["results"])
    }
    settings = {**raw["settings"], "measured": measured_in}
    record.publish(options.json, "simulator", before, settings, results, steps_section)


def of_suite(raw: dict[str, Any], suite: str, costs: ProfiledCosts) -> dict[str, Any]:
    kinds = {
        kind: predicted(names, plans, costs)
        for kind, (names, plans) in measured_plans(raw, suite).items()
    }
    every = list(kinds.values())
    found = {
        "models": sum(len(set(kind.models)) for kind in every),
        "plans": sum(len(kind.names) for kind in every),
        "scores": scores(every),
        "by_kind": {name: scores([kind])[OURS] for name, kind in kinds.items()},
        "retest_gmae": retest_gmae(every),
        "lower_mape": lower_mape(every),
        "coverage": coverage(every),
        "choices": choices(every),
        "picks": picks(every),
        "over_ours": over_ours(every),
    }
    if suite == DRAWN:
        found["workloads"] = {name: heavy_and_light(kind, costs) for name, kind in kinds.items()}
    return found


if __name__ == "__main__":
    main()

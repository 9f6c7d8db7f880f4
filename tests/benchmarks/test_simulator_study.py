"""Scores of simulated steps by hand, and the pages that show them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.record import environment
from benchmarks.harness.statistics import Spread
from benchmarks.simulator import lag, page, study
from benchmarks.simulator.scores import (
    AFFINE,
    OURS,
    Predicted,
    choices,
    coverage,
    lower_mape,
    regrets,
    retest_gmae,
    scores,
)
from benchmarks.simulator.sharders import TABLE_III
from benchmarks.simulator.steps import SAME
from benchmarks.simulator.workloads import EXCHANGES, HOST, IDLE, LOOKUPS

KINDS = ("bls, training", "gloo, training")


def kind(models: int, plans: int, error: float) -> Predicted:
    """Plans of which each takes 10 % longer than the one before, with half the steps 2 % longer."""
    names, measured, us = [], [], []
    job = SimpleNamespace(backend="bls", training=True)
    for model in range(models):
        for plan in range(plans):
            typical = 1000.0 * (model + 1) * 1.1**plan
            names.append(("ours 1", SAME.join(["torchrec", *TABLE_III]), "row_wise")[plan])
            steps = [typical * 0.99] * 2 + [typical * 1.01] * 2
            measured.append(
                SimpleNamespace(model=f"model {model}", job=job, us=steps, typical_us=typical)
            )
            us.append(typical)
    exact = np.array(us)
    by_method = {OURS: exact * (1 + error), AFFINE: exact * (1 + 2 * error)}
    by_method["sum of kernels"] = exact / 2
    return Predicted(names, measured, by_method)  # type: ignore[arg-type]


def test_errors_by_hand() -> None:
    both = [kind(3, 2, 0.1), kind(2, 2, -0.1)]
    found = scores(both)[OURS]
    # 6 plans 10 % too long and 4 too short.
    assert found["bias"] == pytest.approx(2.0)
    for error in ("gmae", "mape", "p95"):
        assert found[error] == pytest.approx(10.0)
    assert retest_gmae(both) == pytest.approx(100 * (1.01 / 0.99 - 1), rel=0.03)
    low, lower, high = lower_mape(both)
    for share in (low, lower, high):
        assert share == pytest.approx(0.5)


def test_choices_by_hand() -> None:
    found = choices([kind(4, 3, 0.1)])
    assert found[OURS]["regret"] == found["ours 1"]["regret"] == pytest.approx(0.0)
    assert found[OURS]["near"] == found[OURS]["models"] == 4
    # Of three plans the first is the best, the second 10 % slower, the last 21 %.
    assert found["naive"]["regret"] == found["torchrec"]["regret"] == pytest.approx(0.1)
    assert found["row_wise"]["regret"] == pytest.approx(0.21)
    assert found["at random, the mean"]["regret"] == pytest.approx((0.0 + 0.1 + 0.21) / 3)


def test_the_best_plan_is_chosen_by_a_visit_that_it_is_not_measured_by() -> None:
    one = kind(1, 2, 0.1)
    # By the first visit b is best, and a takes 2/3 of its second; by the second a is, and b 1/2.
    for plan, us in zip(one.measured, ([2.0, 2.0], [1.0, 3.0]), strict=True):
        plan.us[:] = us
    shares = regrets(one.measured)
    assert shares == pytest.approx([((2 / 3 - 1) + 0) / 2, (0 + (1 / 2 - 1)) / 2])


def test_intervals_are_those_of_other_models() -> None:
    random, one = np.random.default_rng(0), kind(5, 3, 0.1)
    for each in one.measured:
        each.us[:] = each.typical_us * np.exp(random.normal(0, 0.1, 100))
    assert coverage([one]) == pytest.approx(0.9, abs=0.03)
    one.by_method[OURS][one.models == "model 0"] *= 2
    # The interval of the four others is wider now, and none of the first one's steps is in its own.
    assert coverage([one]) == pytest.approx(0.8 * 0.95, abs=0.05)


def test_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = kind(3, 3, 0.1)
    monkeypatch.setattr(study, "measured_plans", lambda *_: dict.fromkeys(KINDS, ([], [])))
    monkeypatch.setattr(study, "predicted", lambda *_: one)
    workloads: dict[str, Any] = {
        "shares": {
            name: {"main": {LOOKUPS: us, EXCHANGES: 10.0, HOST: 20.0, IDLE: 5.0}}
            for name, us in (("heavy", 100.0), ("light", 10.0))
        },
        "timeline": [(0, LOOKUPS, 0.0, 10.0), (3, EXCHANGES, 10.0, 15.0)],
    }
    monkeypatch.setattr(study, "heavy_and_light", lambda *_: workloads)
    costs: Any = None
    steps = {"environment": environment(), "results": {"A": study.of_suite({}, "A", costs)}}
    text = page.steps_section(steps)
    assert "6 models, 18 plans" in text
    assert "| simulated | 10.0 | 10.0 | 10.0 | 10.0 |" in text
    # Of the six sharders one plan is there, 10 % slower than the best and predicted 10 % too long.
    assert "| 0 | bls, training | naive | 1.21 | 1.10 | +10.0 | naive | 1.10 | 0.0 |" in text
    assert "in 6 of 6 (100 %), the simulation's in 6 (61 to 100 %)" in text
    results = steps["results"]
    assert "| torchrec | 1.10 (1.10-1.10) |" in page.planners_table(results)
    assert page.faster_planners(results) == []
    cells = [
        {"ranks": 4, "delays": "none", "bound": bound, "measured_ms": [measured]}
        | {"simulated_ms": simulated}
        for bound, measured, simulated in zip(
            lag.BOUNDS, [10, 8, 8, 8, 8, 7.9], [11, 8, 8, 8, 8, 8], strict=True
        )
    ]
    figure_7 = [
        {"ranks": 8, "bound": bound, "measured_ms": {"mean": 10.0, "ci95": 1.0}}
        | {"simulated_ms": 9.0}
        for bound in (0, 1)
    ]
    delayed = {"environment": environment(), "results": {"cells": cells, "figure_7": figure_7}}
    text = lag.section(delayed)
    # Bound 1 is the smallest within 3 % of the fastest simulated one.
    assert "| 1 | 1.3 |" in text
    assert "within 3 % of the best in 1 of 1" in text
    assert "| 8 | 1 | 10.00 ± 1.00 | 9.00 | -10.0 |" in text
    names = ("simulated", "no contention", "sum of kernels")
    one_suite = {"suite": "A", "ms": Spread([3.0]), "predicted_ms": dict.fromkeys(names, 2.9)}
    page.draw(tmp_path / "figure.png", steps, delayed, {"results": [one_suite]})
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")

"""The statistics of executed plans, by hand."""

from typing import Any

import pytest

from benchmarks.planner.page import executed_tables, regrets, search_table, summarize


def model(**ms: list[float]) -> dict[str, Any]:
    """Two steps of each plan; the prediction is the mean."""
    plans = {
        name: {"ms": steps, "predicted_us": {"microseconds": 1e3 * sum(steps) / len(steps)}}
        for name, steps in ms.items()
    }
    raw = {"results": [{"backend": "gloo", "plans": plans}]}
    (result,) = summarize(raw)["results"]
    return result


def test_the_best_plan_is_chosen_by_steps_that_it_is_not_measured_by() -> None:
    # By the first step b is best, and a takes 2/3 of its second one; by the second a is, and b 1/2.
    shares = regrets(model(a=[2.0, 2.0], b=[1.0, 3.0]), ["a", "b"])
    assert shares == pytest.approx([((2 / 3 - 1) + 0) / 2, (0 + (1 / 2 - 1)) / 2])


def test_tables_of_executed_plans() -> None:
    models = [
        model(ours=[1.0, 1.0], torchrec=[2.0, 2.0]),
        model(ours=[1.0, 1.0], torchrec=[4.0] * 2),
    ]
    _, table, picked = executed_tables(models)
    assert "| ours | 0.0 | 2 of 2 (34 to 100 %) |  |" in table
    assert "| torchrec | 200.0 | 0 of 2 (0 to 66 %) | 2.828 (" in table
    assert "within 10 % of the fastest in 2 of 2" in picked
    assert "signed bias +0 %" in picked


def test_table_of_planning() -> None:
    problem = {"tables": 20, "ranks": 4, "memory": "little"}
    ours = {"planner": "ours", "peak_mib": 300.4, "over_bound": 0.034, "fullest_rank": 0.99}
    theirs = {"planner": "torchrec", "peak_mib": 99.0, "over_bound": 0.5, "fullest_rank": 0.7}
    failed = {"planner": "torchrec", "seconds": 60.0, "failure": "no result in 60 s"}
    results = [problem | ours | {"seconds": 0.5}, problem | theirs | {"seconds": 2.0}]
    text = search_table({"results": [*results, problem | failed]})
    _, table, failure = text.split("\n\n")
    assert "| 20 x 4 | little | ours | 0.50 | 300 | 3.4 | 99.0 |" in table
    assert "| 20 x 4 | little | torchrec | 2.00 60.00 | 99 | 50.0 none | 70.0 none |" in table
    assert failure == "No result: 20 x 4, little memory, torchrec: no result in 60 s."

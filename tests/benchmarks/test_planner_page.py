"""The table of planning, by hand."""

from benchmarks.planner.page import search_table


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

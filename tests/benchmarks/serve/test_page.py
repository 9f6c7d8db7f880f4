"""What pages say of a load and of refreshes."""

from typing import Any

from benchmarks.serve.page import load_section, refresh_section

ENVIRONMENT = {
    "cpu": "Some CPU",
    "cores": 2,
    "load_average": 0.1,
    "kernel": "6.1",
    "commit": "abc",
    "date": "2026-01-02T03:04:05",
    "command": "python -m benchmarks.serve.load",
    "versions": {"torch": "2.13.0"},
}


def level(in_time_rate: float, refused: int) -> dict[str, Any]:
    return {
        "in_time_rate": {"median": in_time_rate},
        "late_percent": {"median": 0.25},
        "refused": {"503": refused, "504": 1},
        "failed": {"reset": 2},
        "offered": 1000,
        "answers_ms": {"p50": 2.04, "p99": 9.0, "p99.9": 12.0},
        "refusals_p99_ms": 3.21 if refused else None,
        "early_refusals_p99_ms": 1.23 if refused else None,
        "server_cores": {"median": 0.9},
        "generator_cores": {"median": 0.125},
    }


def test_levels_stand_in_order_with_the_capacity_among_them() -> None:
    result = {
        "tables": "INT8",
        "capacity": 400.0,
        "confirmed": level(398.0, 0),
        "refusal_ms": 0.0625,
        "levels": [
            {"level": 0.5, "rate": 200.0, "allowed_rate": 720.0, **level(200.0, 0)},
            {"level": 3.0, "rate": 1200.0, "allowed_rate": 395.4, **level(390.0, 699)},
        ],
    }
    settings = {"deadline_s": 0.02, "repetitions": 3, "run_s": 20.0}
    text = load_section({"environment": ENVIRONMENT, "settings": settings, "results": [result]})
    assert "At most 20 ms from the intended send" in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if "INT8" in line]
    assert "that refusals leave, of which one takes 0.062 ms." in text
    assert [row[1:5] for row in rows] == [
        ["50", "200", "200", ""],
        ["100", "400", "398", ""],
        ["300", "1200", "390", "395"],
    ]
    assert rows[2][5:] == ["0.25", "70.0", "2", "2.0", "9.0", "12.0", "3.2", "1.2", "0.90", "0.12"]


def test_refreshes_stand_beside_copies() -> None:
    run = {
        **{"offered": 100, "in_time": 90, "late": 1, "refused": {"503": 7, "504": 2}, "failed": {}},
        "answers_ms": {"p50": 2.0, "p99": 9.0, "p99.9": 12.0},
        "server_cores": 0.5,
    }
    results = {
        "refreshed": run,
        "beside": {**run, "in_time": 99, "refused": {}},
        "written": 30,
        "versions": {"v1": 40, "v2": 51},
        "answers": 91,
        "wrong": 0,
        "largest_difference": 1.5e-7,
    }
    settings = {"tables": "float", "rate": 100.0, "seconds": 300.0, "every_s": 10.0}
    text = refresh_section({"environment": ENVIRONMENT, "settings": settings, "results": results})
    assert "30 checkpoints, one every 10 s. 2 versions have answered. 0 of 91 answers" in text
    assert "largest difference is 1.5e-07" in text
    assert "| refreshes | 100 | 90 | 1 | 9 | 0 | 2.0 | 9.0 | 12.0 | 0.50 |" in text
    assert "| copies of as many bytes | 100 | 99 | 1 | 0 |" in text

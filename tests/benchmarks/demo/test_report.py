"""The demo's numbers and how they are shown."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.demo.plot import write_plot
from benchmarks.demo.report import WIDTH, format_slowest, format_table, write_json, write_waiting
from benchmarks.demo.settings import Settings
from benchmarks.demo.summary import Line, mean_and_interval, summarize, wrong_results

SETTINGS = Settings(
    data=Path("train.txt"),
    ranks=2,
    bounds=(0, 1),
    steps=2,
    runs=2,
    batch=8,
    max_delay=0.01,
    embedding_dim=8,
    seed=0,
)


def rank(
    total: float,
    slept: list[float],
    wait_seconds: Sequence[float],
    started: float = 5.0,
    waits: int = 1000,
    **changes: Any,
) -> dict[str, Any]:
    times = {
        "started": started,
        "total": total,
        "slept": slept,
        "own": [1.0, 1.0, 0.0],
        "waited": 1.0,
        "answered": [0.5 * total, 0.7 * total],
    }
    channels = [
        {
            "messages": 9,
            "bytes": 9,
            "pulled_messages": pulled,
            "largest_message": 9,
            "wait_seconds": wait_seconds,
            "lag_histogram": [waits, 0],
            "slot_bytes": 2**10,
            "ring_bytes": 2**19,
            "seconds": 20.0,
        }
        for pulled in (1, 2)
    ]
    return {
        "times": [times, times],
        "channels": channels,
        "max_difference": 0.0,
        "equals_torchrec": True,
        "equals_first_bound": True,
        **changes,
    }


def line(bound: int | None, waits: int = 1000, **changes: Any) -> Line:
    ranks = [
        rank(8.0, [1.0, 3.0, 0.0], [0.0, 0.25], waits=waits),
        rank(10.0, [2.0, 1.0, 0.0], [1.25, 0.0], waits=waits, **changes),
    ]
    if bound is None:
        ranks = [{**one, "channels": []} for one in ranks]
    name = "TorchRec on gloo" if bound is None else f"bound {bound}"
    return summarize({"name": name, "bound": bound, "ranks": ranks})


def test_steps_and_throughput_as_in_the_paper() -> None:
    found = line(0)
    assert found.step_ms == pytest.approx(4500)
    assert found.answer_ms == pytest.approx(1000 * (0.5 * 10 + 0.7 * 8) / 2)
    assert found.step_ci_ms == pytest.approx(3.182 * math.sqrt(1000**2 / 3) / 2)
    assert found.throughput == pytest.approx(1 / 4 + 1 / 5)
    assert found.throughput_ci == pytest.approx(0)
    assert found.wait_share == pytest.approx(4 / 36)
    assert found.pulled == 6
    assert found.ring_bytes == 2**20


def test_ideal_uses_the_bound_and_the_measured_work() -> None:
    # k = 0: posts at 2 and, after 1 of work and a delay of 3, at 6; then 1 of work.
    assert line(0).ideal_ms == pytest.approx(7000 / 2)
    # k = 1: rank 0 ends at 6, rank 1 at 5, when the last post has come.
    assert line(1).ideal_ms == pytest.approx(5500 / 2)
    # k = 0 with rank 1 starting 1 late: posts at 3 and 7, end at 8, which is 7 after its start.
    assert line(0, started=6.0).ideal_ms == pytest.approx((8000 + 7000) / 2 / 2)
    assert line(None).ideal_ms is None
    assert line(None).wait_share is None


def test_mean_and_interval() -> None:
    mean, interval = mean_and_interval([5.0])
    assert mean == 5.0
    assert math.isnan(interval)
    assert mean_and_interval([1.0, 3.0]) == (2.0, pytest.approx(12.706))
    assert mean_and_interval([1.0, 3.0] * 20)[1] == pytest.approx(1.96 * math.sqrt(40 / 39 / 40))


def test_wrong_results_are_named() -> None:
    assert wrong_results([line(None), line(0), line(1)]) == []
    problems = wrong_results(
        [
            line(None),
            line(2),
            line(1, equals_torchrec=False, equals_first_bound=False, max_difference=0.5),
        ]
    )
    assert problems == [
        "bound 1: logits differ from the first run of TorchRec on gloo by up to 0.5",
        "bound 1: logits are not bit-identical to those of bound 2",
    ]


def test_table_fits_even_with_large_numbers() -> None:
    large = Line(
        name="bound 16",
        bound=16,
        step_ms=12345.67,
        step_ci_ms=1234.56,
        answer_ms=123456.7,
        throughput=123456.7,
        throughput_ci=1.0,
        wait_share=1.0,
        ideal_ms=12345.67,
        max_difference=1.234e-12,
        equals_torchrec=False,
        equals_first_bound=True,
        ring_bytes=2**34,
        pulled=123456,
    )
    rows = format_table([line(None), line(0), large]).splitlines()
    assert len(rows) == 5
    assert max(len(row) for row in rows) <= WIDTH
    assert rows[2].split()[-4:] == ["-", "-", "0", "-"]
    assert "16384.0" in rows[4]
    assert "100.0 %" in rows[4]


def test_a_rank_is_named_where_it_holds_the_others_up(tmp_path: Path) -> None:
    # Rank 0 waited 0.5 s in its two channels, rank 1 2.5 s, of 20 s.
    assert format_slowest([line(None)]) == ""
    assert format_slowest([line(None), line(0), line(2), line(4, waits=9)]) == (
        "rank that holds the others up (how much shorter steps would be without its lateness):\n"
        "  bound 0: rank 0 (10%); bound 2: rank 0 (10%)"
    )
    # Nine steps are too few to tell.
    assert format_slowest([line(None), line(4, waits=9)]).startswith("No rank holds the others up")
    write_waiting(tmp_path / "waiting.txt", [line(None), line(0), line(4, waits=9)], "2 ranks")
    text = (tmp_path / "waiting.txt").read_text()
    assert text.startswith("Who waited for whom: 2 ranks\n20")
    assert "\n\nbound 0\nrank 0 holds the others up: it waited least" in text
    assert "\n\nbound 4\nno rank stands out: were rank 0" in text


def test_json_and_plot(tmp_path: Path) -> None:
    lines = [line(None), line(0), line(1)]
    single = [Line(**{**vars(found), "throughput_ci": math.nan}) for found in lines]
    write_json(tmp_path / "demo.json", single, SETTINGS)
    report = json.loads((tmp_path / "demo.json").read_text())
    assert report["lines"][1]["bound"] == 0
    assert report["lines"][1]["throughput_ci"] is None
    assert report["settings"]["data"] == "train.txt"
    assert report["lines"][0]["waiting"] is None
    assert report["lines"][1]["waiting"]["slowest"] == 0
    assert {"step_ms", "step_ci_ms", "answer_ms"} <= report["lines"][1].keys()
    assert {"command", "date", "versions", "hardware"} <= report.keys()
    assert report["versions"]["torch"] != "not installed"
    write_plot(tmp_path / "demo.png", lines, "2 ranks")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")

"""Pages say what the records say, and those in the repository are the records'."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from benchmarks import results_pages
from benchmarks.codecs.page import exchange_section
from benchmarks.codecs.page import section as codecs_section
from benchmarks.delays.page import section as delays_section
from benchmarks.exchange.page import section as exchange_of_bytes
from benchmarks.harness import page, record
from benchmarks.harness.statistics import (
    Spread,
    difference_interval,
    geometric_mean,
    mean_interval,
    ratio_of_medians,
    share_interval,
)
from benchmarks.modules.page import backend_section
from benchmarks.modules.page import section as modules_section
from benchmarks.planner.page import section as planner_section
from benchmarks.simulator.scores import PLANNERS

ROOT = Path(__file__).parents[1]


def spread(median: float) -> dict[str, float]:
    return {"median": median, "min": 0.9 * median, "max": 1.1 * median}


ENVIRONMENT = {
    "cpu": "Some CPU",
    "cores": 2,
    "load_average": 0.1,
    "kernel": "6.1",
    "commit": "abc",
    "date": "2026-01-02T03:04:05",
    "command": "python benchmarks/x.py",
    "versions": {"torch": "2.13.0"},
}
DLRM = [
    {"name": "TorchRec on gloo", "bound": None, "ms_per_step": spread(20.0)},
    {
        "name": "bound 1",
        "bound": 1,
        "ms_per_step": spread(21.0),
        "ideal_ms": 15.0,
        "wait_share": 0.2,
    },
]
TOY: dict[str, Any] = {
    "delays": {
        "sleep": [
            {
                "ranks": 4,
                "bound": 2,
                "ms_per_step": {n: spread(10.0) for n in ("ideal", "channel", "gloo")},
                "ratio": {"channel": spread(1.02), "gloo": spread(1.05)},
            }
        ],
        "forward": [
            {
                "ranks": 4,
                "batch": 512,
                "ms_per_step": {"torchrec": spread(30.0), "ours": spread(24.0)},
                "ratio": {"ours": spread(0.8)},
            }
        ],
        "dlrm": DLRM,
        "heterogeneous": DLRM,
    },
    "embedding": [
        {
            "module": "EC",
            "sharding": "row_wise",
            "ranks": 4,
            "batch": 512,
            "ids": 20,
            "pooling": "mean",
            "ms": {
                name: spread(ms)
                for name, ms in {"torchrec": 30.0, "backend": 20.0, "ours": 10.0}.items()
            },
            "speedup": [2.8, 3.0, 3.3],
            "over_lookup": [1.9, 2.0, 2.1],
        }
    ],
    "backend": {
        "alltoall": [
            {
                "mode": "one_shot",
                "ranks": 2,
                "size": 4096,
                "bls": spread(10.0),
                "gloo": spread(60.0),
            }
        ],
        "torchrec": [
            {
                "module": "EBC",
                "sharding": "table_wise",
                "ranks": 4,
                "batch": 512,
                "bls": spread(20.0),
                "gloo": spread(18.0),
                "free": spread(15.0),
            }
        ],
    },
    "alltoall": [
        {
            "mode": "one_shot",
            "ranks": 2,
            "bytes_per_pair": 4096,
            "peers": {
                "raw": {"us_per_call": spread(0.2)},
                "channel": {"us_per_call": spread(0.3)},
                "open_mpi": {"us_per_call": spread(0.2)},
            },
        }
    ],
    "codecs": [
        {"peer": "memcpy", "gb_per_s": spread(9.0)},
        *(
            {
                "peer": peer,
                "bits": 4,
                "columns": 64,
                "direction": direction,
                "gb_per_s": spread(speed),
            }
            for peer, speeds in (("ours", (8.0, 6.0)), ("FBGEMM", (4.0, 12.0)))
            for direction, speed in zip(("encode", "decode"), speeds, strict=True)
        ),
    ],
    "codec_exchange": [
        {
            **{"network": network, "part": "forward", "codec": codec},
            **{"bytes": size, "most_of_rank": size // 4, "ms": spread(ms)},
        }
        for network, times in (
            ("shared memory", (4.0, 8.0)),
            ("100 Gbit/s a rank", (10.0, 11.0)),
            ("1 Gbit/s a rank", (60.0, 15.0)),
        )
        for codec, size, ms in zip(("fp32", "uint4"), (6_400_000, 1_000_000), times, strict=True)
    ],
    "simulator": {
        "A": {
            "over_ours": {
                backend: {name: [ratio - 0.1, ratio, ratio + 0.1] for name in PLANNERS}
                for backend, ratio in (("bls", 1.5), ("gloo", 0.9))
            }
        }
    },
    "sharding_search": [
        {"tables": 20, "ranks": 4, "planner": planner, "seconds": seconds, **result}
        for planner, seconds, result in (
            ("ours", 0.2, {"over_bound": 0.011}),
            ("ours", 0.4, {"over_bound": 0.014}),
            ("torchrec", 1.0, {"over_bound": 0.5}),
            ("torchrec", 60.0, {"failure": "no result in 60 s"}),
        )
    ],
}


def toy(name: str) -> dict[str, Any]:
    return {"environment": ENVIRONMENT, "settings": {"ranks": 4}, "results": TOY[name]}


@pytest.fixture(scope="module")
def records() -> dict[str, Any]:
    return results_pages.load()


def test_the_pages_are_those_of_the_records(records: dict[str, Any]) -> None:
    for path, text in results_pages.written(records).items():
        same = path.read_text() == text
        assert same, f"{path} differs from the records: run python -m benchmarks.results_pages"


@pytest.mark.slow
def test_the_figures_that_pages_show_are_drawn(records: dict[str, Any], tmp_path: Path) -> None:
    results_pages.draw(tmp_path, records)
    drawn = {path.name for path in tmp_path.rglob("*.png")}
    pages = {ROOT / path for path, _ in results_pages.SECTIONS}
    shown = {
        Path(target).name
        for path in pages
        for target in re.findall(r"!\[[^]]*\]\((.*?\.png)\)", path.read_text())
        if "://" not in target
    }
    assert drawn <= shown and all(list(ROOT.rglob(f"docs/**/{name}")) for name in shown)


def test_sections_of_toy_records() -> None:
    text = "\n".join(
        [
            delays_section(toy("delays")),
            modules_section(toy("embedding")),
            exchange_of_bytes(toy("alltoall")),
            backend_section(toy("backend"), toy("alltoall")),
            codecs_section(toy("codecs")),
            exchange_section(toy("codec_exchange")),
            planner_section(toy("simulator"), toy("sharding_search")),
        ]
    )
    for line in (
        "| 4 | 2 | 10.00 | 10.00 (+2.0 %) | 10.00 (+5.0 %) |",
        "| EC row-wise | 4 | 512 | 20 mean | hot | 64 | 30.00 | 20.00 | 10.00 | 3.00 (2.80-3.30) | "
        "2.00 (1.90-2.10) |",
        "| 2 | 4 KiB | 0.20 / - | 0.30 / - | 0.20 / - | - / - | - / - |",
        "| EBC table-wise | 4 | 18.00 | 20.00 | 0.9 | 1.2 |",
        "- single calls, 2 ranks, 4 KiB: Open MPI",
        "| 2 | 4 KiB | single calls | 60.0 | 10.0 | 6.0 | 0.2 | 50.00 |",
        "- backend, single calls, 2 ranks, 4 KiB: Open MPI, called from C",
        "- unmodified TorchRec, EBC table-wise, 4 ranks: gloo",
        "| 4 | 64 | 8.0 (2.00) | 6.0 (0.50) |",
        "| 1 Gbit/s a rank | forward | uint4 | 1.00 | 6.4 | 15.00 | 4.00 | 0.67 / 0.87 |",
        "- forward, shared memory, uint4: float32",
        "| torchrec | 1.50 (1.40-1.60) | 0.90 (0.80-1.00) |",
        "| 20 x 4 | 0.2-0.4 | 1.1-1.4 % | 1.0-60.0 | 50.0 % (1 of 2 none) |",
        "- plans, gloo, 2 ranks with a core each: torchrec",
        "- DLRM (dlrm), bound 1: TorchRec on gloo",
        "- decode 4 bits, rows of 64: FBGEMM",
    ):
        assert line in text


def test_a_run_is_a_summary_and_its_samples(tmp_path: Path) -> None:
    path = tmp_path / "results" / "some.json"
    results = [{"ranks": 2, "ms": Spread([3.0, 1.0, 2.0])}]
    for _ in range(2):  # the bytes depend on the results alone
        record.publish(path, "some", {}, {"turns": 3}, results, str)
    spread = {"median": 2.0, "q1": 1.5, "q3": 2.5, "min": 1.0, "max": 3.0}
    assert record.read(path)["results"] == [{"ranks": 2, "ms": spread}]
    raw = tmp_path / "raw" / "some.json.bz2"
    assert record.raw_path(path) == raw
    assert record.read_raw(raw)["results"] == [{"ranks": 2, "ms": [3.0, 1.0, 2.0]}]


def test_a_stopped_record_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "some.json"

    def resumed(turns: int) -> record.Resumable:
        empty = {"settings": {"turns": turns}, "results": []}
        return record.Resumable(path, empty, lambda raw: {**raw, "results": [sum(raw["results"])]})

    resumed(3).add(1.0)
    again = resumed(3)
    assert again.raw["results"] == [1.0]
    again.add(2.0)
    assert record.read_raw(record.raw_path(path))["results"] == [1.0, 2.0]
    assert record.read(path)["results"] == [3.0]
    with pytest.raises(record.RecordError, match="write to another file"):
        resumed(4)


def test_unusable_records_name_their_command(tmp_path: Path) -> None:
    with pytest.raises(record.RecordError, match=r"missing.*python -m benchmarks\.delays\.delays"):
        record.read(tmp_path / "delays.json", "python -m benchmarks.delays.delays")
    (tmp_path / "delays.json").write_text("{")
    with pytest.raises(record.RecordError, match="no JSON"):
        record.read(tmp_path / "delays.json")
    (tmp_path / "delays.json").write_text("{}")
    with pytest.raises(record.RecordError, match="no results"):
        record.read(tmp_path / "delays.json")


def test_pages_are_filled_between_their_markers() -> None:
    first = f"<!-- x: written by {page.WRITER} -->"
    before = f"# Title\n{first}\nold\n<!-- end of x -->\nThe end\n"
    after = page.fill(before, "x", "new")
    assert after == f"# Title\n{first}\n\nnew\n\n<!-- end of x -->\nThe end\n"
    assert page.fill(after, "x", "new") == after
    with pytest.raises(page.PageError, match="needs the lines"):
        page.fill("# Title\n", "x", "new")


def test_statistics_by_hand() -> None:
    # 5 samples with deviation sqrt(2.5): 2.776 * sqrt(2.5 / 5).
    found = mean_interval([1, 2, 3, 4, 5])
    assert found["mean"] == 3 and found["ci95"] == pytest.approx(1.963, abs=1e-3)
    new, old = [1.0, 2.0, 3.0, 4.0, 6.0], [2.0, 4.0, 9.0, 3.0, 1.0]
    welch = stats.ttest_ind(new, old, equal_var=False).confidence_interval()
    low, difference, high = difference_interval(mean_interval(new), mean_interval(old), samples=5)
    assert difference == pytest.approx(3.2 - 3.8)
    assert (low, high) == pytest.approx((welch.low, welch.high))
    assert difference_interval({"mean": 1, "ci95": 0}, {"mean": 3, "ci95": 0}, 2) == (-2, -2, -2)
    # The performance-modelling paper's 17 of 20, and both ends.
    assert share_interval(17, 20) == pytest.approx((0.640, 0.948), abs=1e-3)
    assert share_interval(0, 20) == pytest.approx((0.0, 0.161), abs=1e-3)
    assert share_interval(20, 20) == pytest.approx((0.839, 1.0), abs=1e-3)
    low, mean, high = geometric_mean([2.0, 8.0])
    assert mean == pytest.approx(4.0) and low < mean < high
    assert low * high == pytest.approx(16.0)
    low, ratio, high = ratio_of_medians([2.0, 2.2, 1.8, 2.0], [1.0, 1.1, 0.9, 1.0])
    assert ratio == 2.0 and 1.6 < low < ratio < high < 2.5
    with pytest.raises(ValueError, match="no samples"):
        Spread([])

"""What the README promises: its snippet is the example, its commands are run before every merge."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_snippet_is_the_quickstart() -> None:
    assert blocks("python") == [(ROOT / "examples" / "quickstart.py").read_text()]


def test_ci_runs_every_command() -> None:
    steps = re.findall(r"^step (.*)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) >= 5
    for command in commands:
        # The file after DATA= is another one there, and more options may follow.
        start = re.sub(r"(?<=DATA=).*", "", command)
        assert any(step.startswith(start) for step in steps), f"{command} is not in .ci/run"


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README)
    missing = [t for t in targets if "://" not in t and not (ROOT / t).exists()]
    assert not missing


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
RESULTS: dict[str, Any] = {
    "delays": {
        "sleep": [
            {
                "ranks": 4,
                "bound": 2,
                "ms_per_step": {n: spread(10.0) for n in ("ideal", "channel", "gloo")},
                "ratio": {"channel": spread(1.02), "gloo": spread(1.05)},
            }
        ],
        "forward": [{"ranks": 4, "ratio": {"ours": spread(0.8)}}],
        "dlrm": DLRM,
        "heterogeneous": DLRM,
    },
    "embedding": [
        {
            "module": "EC",
            "sharding": "row_wise",
            "ranks": 4,
            "batch": 512,
            "ms": {"torchrec": spread(30.0), "ours": spread(10.0), "lookup": spread(5.0)},
        }
    ],
    "backend": {
        "alltoall": [
            {
                "mode": "train",
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
            "peers": {"raw": {"us_per_call": spread(0.2)}, "channel": {"us_per_call": spread(0.3)}},
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
        {"network": "1 Gbit/s", "dim": 64, "codec": codec, "bytes": size, "ms": spread(ms)}
        for codec, size, ms in (("fp32", 6_400_000, 60.0), ("uint4", 1_000_000, 15.0))
    ],
    "sharding_executed": [
        {
            "backend": backend,
            "plans": {"ours": {"ms": [8.0, 8.0, 9.0]}, "torchrec": {"ms": [ms, ms + 0.5, ms]}},
        }
        for backend, times in (("bls", (12.0, 12.0)), ("gloo", (7.0, 7.0)))
        for ms in times
    ],
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


@pytest.fixture
def readme(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import readme

    return readme


def write_results(folder: Path) -> None:
    for name, results in RESULTS.items():
        record = {
            "benchmark": name,
            "environment": ENVIRONMENT,
            "settings": {"ranks": 4},
            "results": results,
        }
        (folder / f"{name}.json").write_text(json.dumps(record))


def test_results_are_filled_in(readme: Any, tmp_path: Path) -> None:
    write_results(tmp_path)
    records = {name: readme.load(tmp_path, name) for name in RESULTS}
    text = readme.fill(README, readme.section(records))
    assert "| 4 | 2 | 10.00 | 10.00 (+2.0 %) | 10.00 (+5.0 %) |" in text
    assert "| EC row-wise | 4 | 512 | 30.00 | 10.00 | 3.0 | 2.0 |" in text
    assert "| 2 | 4 KiB | 0.20 / - | 0.30 / - | - / - | - / - | - / - |" in text
    assert "| EBC table-wise | 4 | 18.00 | 20.00 | 0.9 | 1.2 |" in text
    assert "up to 32 KiB per pair: 6 to 6 times faster" in text
    assert "- unmodified TorchRec, EBC table-wise, 4 ranks: gloo" in text
    assert "| 4 | 64 | 8.0 (2.00) | 6.0 (0.50) |" in text
    assert "| 1 Gbit/s | 64 | uint4 | 1.00 | 6.40 | 15.00 | 4.00 |" in text
    assert "| torchrec | 1.50 (1.50-1.50) | 0.88 (0.88-0.88) |" in text
    assert "| 20 x 4 | 0.2-0.4 | 1.1-1.4 % | 1.0-60.0 | 50.0 % (1 of 2 none) |" in text
    assert "- plans, sharders on gloo: torchrec" in text
    assert "- DLRM (dlrm), bound 1: TorchRec on gloo" in text
    assert "- decode 4 bits, rows of 64: FBGEMM" in text
    assert readme.fill(text, readme.section(records)) == text


def test_figures_are_drawn(readme: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_results(tmp_path)
    (tmp_path / "README.md").write_text(README)
    figures = tmp_path / "figures"
    paths = {"results": tmp_path, "readme": tmp_path / "README.md", "figures": figures}
    arguments = [text for name, path in paths.items() for text in (f"--{name}", str(path))]
    monkeypatch.setattr("sys.argv", ["readme.py", *arguments])
    assert readme.main() == 0
    shown = re.findall(r"!\[[^]]*\]\(docs/figures/(.*?)\)", (tmp_path / "README.md").read_text())
    assert sorted(shown) == sorted(path.name for path in figures.iterdir())
    (tmp_path / "delays.json").unlink()
    assert readme.main() == 1


def test_a_missing_record_names_its_command(readme: Any, tmp_path: Path) -> None:
    write_results(tmp_path)
    (tmp_path / "embedding.json").unlink()
    with pytest.raises(readme.ResultsError, match=r"missing.*python benchmarks/embedding\.py"):
        readme.load(tmp_path, "embedding")


def test_an_incomplete_record_names_what_it_lacks(readme: Any, tmp_path: Path) -> None:
    record = {"benchmark": "delays", "results": {"sleep": RESULTS["delays"]["sleep"]}}
    (tmp_path / "delays.json").write_text(json.dumps(record))
    with pytest.raises(readme.ResultsError, match="'forward', 'heterogeneous', 'dlrm'"):
        readme.load(tmp_path, "delays")


def test_a_readme_without_markers_is_refused(readme: Any) -> None:
    with pytest.raises(readme.ResultsError, match="needs the lines"):
        readme.fill("# Title\n", "text")

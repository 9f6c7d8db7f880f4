"""The record of the BLS paper's evaluation becomes tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper_bls.page import draw, section, summarize

ENVIRONMENT = {
    "cpu": "Some CPU",
    "cores": 2,
    "kernel": "6.1",
    "command": "python x",
    "load_average": 0.1,
    "commit": "abc",
    "date": "2026-01-02T03:04:05",
    "versions": {"torch": "2.13.0"},
}


def dlrm(backend: str, bound: int, ms: float) -> dict[str, Any]:
    runs = [[ms, ms], [ms + 1, ms + 1]]
    return {"backend": backend, "bound": bound, "step_ms": runs, "result_ms": runs}


def window(peer: str, bound: int, ms: float, ideal: float) -> dict[str, Any]:
    runs = [ms, ms + 1]
    return {"peer": peer, "bound": bound, "computed_ideal_ms": ideal, "ms_per_step": runs}


def overlap(backend: str, bound: int, exchanges: int) -> dict[str, Any]:
    return {
        "backend": backend,
        "bound": bound,
        "trials": 3,
        "same_iteration": 3,
        "other_iteration": 3 if bound else 0,
        "exchanges": exchanges,
        "one_sided": 0,
    }


DLRM = [dlrm("bls", 0, 5), dlrm("gloo", 0, 7), dlrm("bls", 2, 3), dlrm("gloo", 2, 4)]
RESULTS: dict[str, Any] = {
    "fig6a-4": [{"bytes": 32768, "us": {"channel": [1.0, 1.0], "bls": [50.0, 52.0]}}],
    "fig6b-4": [{"repetitions": 1000, "seconds": {"channel": [0.01, 0.01]}}],
    "fig7-delays-4": [window("shm", 0, 13, 12.5), window("shm", 2, 11, 10.5)],
    "fig7-sizes-4": [window("tcp", 0, 1, 0), window("tcp", 2, 0.5, 0)],
    "fig7-dlrm-delays-4": DLRM,
    "fig7-dlrm-ids-4": DLRM,
    "fig8-4": DLRM,
    "table1-4": [overlap("gloo", 0, 1), overlap("gloo", 2, 2)],
}


@pytest.fixture
def stages() -> dict[str, Any]:
    settings = {"bounds": [0, 2], "runs": 2}
    return {
        name: {"environment": ENVIRONMENT, "settings": settings, "results": results}
        for name, results in RESULTS.items()
    }


def test_tables_and_figures(stages: dict[str, Any], tmp_path: Path) -> None:
    record = summarize({"stages": stages})
    text = section(record)
    for row in (
        "| 32 KiB | 1.00 ± 0.00 | - | 51.0 ± 12.7 | - | - |",
        "| Fig. 7, delays, dense part a sleep | 4 | -15 % (-37 to +8) | - | - | - |",
        "| 1,000 | 0.01000 ± 0.00000 | - | - | - |",
        "| 2 | 10.50 | 11.5 ± 6.4 |",
        "|  | ranks | channel, shm | channel, tcp | backend bls | backend gloo |",
        "| 2 |  | 1.00 ± 6.35 |",
        "| 0 | 5.50 ± 6.35 | 7.50 ± 6.35 | 367 ± 424 | 268 ± 227 | 5.50 ± 6.35 |",
        "| compute and collective across iterations | no (0/3) | yes (3/3) |",
        "| collective and collective across iterations | no (1 of 1) | yes (2 of 3) |",
    ):
        assert row in text
    assert text.count("### ") == 1 + len(stages)
    draw(tmp_path, record)
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {"bls-fig6.png", "bls-fig7.png", "bls-fig8.png"}

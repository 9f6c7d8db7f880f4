"""The whole run by Triton's interpreter: its record, tables and exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import run
from benchmarks.gpu.lookups import LIMIT, OURS, PAGEABLE, PINNED, STAGED, UNSHARDED
from benchmarks.gpu.models import Tables, drawn
from tests.benchmarks.gpu.fake_cuda import FakeCuda, quick_cuda
from tests.paths import ROOT

SMALL = {"rows": 20, "dim": 4, "batch": 2}
SIZES: dict[str, Any] = {
    "tables": [{"rows": 20, "dim": 4, "stored": stored} for stored in ("float", "int8")],
    "cells": [(2, 1, "uniform"), (2, 2, "zipf")],
    "turns": 1,
    "waits": {**SMALL, "forwards": 2},
    "graphs": {**SMALL, "width": 8, "replays": 3},
    "gemms": {**SMALL, "side": 8, "turns": 1},
    "versions": {**SMALL, "seconds": 0.5, "versions": 2},
    "evaluations": [{**SMALL, "ids": 1, "width": width, "steps": 1} for width in (8, 0)],
}
STEPS = [
    "GPU",
    "facts",
    "tests",
    "lookups",
    "waits",
    "graphs",
    "beside GEMMs",
    "versions",
    "evaluation",
]


def interpreting_cuda() -> FakeCuda:
    """A GPU of both benchmark and package, whose kernels are interpreted."""
    from tests.gpu.sharded import gpu_here

    gpu_here()
    return quick_cuda()


def main() -> None:
    # The tests of the package run by themselves.
    run.Run._tests = lambda self, deadline: iter([{"what": "tests/gpu", "said": "left out"}])
    sys.exit(run.run(interpreting_cuda, SIZES, 1500.0, Path(sys.argv[1])))


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_all_steps_are_in_the_record_and_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    ended = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.gpu.test_run", str(path)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Nothing is wrong." in ended.stdout
    record = json.loads(path.read_text())
    assert [(each["step"], each["outcome"]) for each in record["steps"]] == [
        (name, "done") for name in STEPS
    ]
    results = record["results"]
    timed = [each for each in results["lookups"] if "us" in each]
    for stored in ("float", "int8"):
        names = [each["what"] for each in timed if each["stored"] == stored]
        ours = (OURS, STAGED, PAGEABLE, PINNED, UNSHARDED, LIMIT)
        assert sorted(names) == sorted(2 * ours)
    assert {each["wrong_numbers"] for each in timed if each["what"] != LIMIT} == {0}
    lacking = {each["what"] for each in results["lookups"] if "lacks" in each}
    assert lacking == {"FBGEMM, HBM", "FBGEMM, UVM", "FBGEMM, UVM caching"}
    versions, held = results["versions"]
    assert versions["wrong_rows"] == 0 and versions["lookups"] > 0
    assert held["hbm_mib_per_gib"] >= 0
    failed = [
        (step, each["what"])
        for step, cells in results.items()
        for each in cells
        if "failed" in each
    ]
    assert failed == 2 * [("evaluation", "HBM")]  # FBGEMM's build for CPUs has no tables there
    assert "| stored float, dim 4, rows 20, batch 2, ids 1, law uniform |" in ended.stdout


def test_wrong_numbers_and_failed_tests_are_problems() -> None:
    assert run.problems({}) == []
    wrong = {"what": OURS, "batch": 2, "wrong_numbers": 3}
    found = run.problems({"lookups": [wrong, {"what": LIMIT}], "tests": [{"failed": "1 failed"}]})
    assert found == [f"lookups: 3 wrong in {OURS}, batch 2", "tests: 1 failed"]
    missing = [{"what": "HBM", "failed": "no kernels"}]
    assert run.problems({"evaluation": missing}) == []
    assert "evaluation, what HBM: no kernels" in run.tables({}, {"evaluation": missing})


def test_ids_lie_in_the_tables_and_frequent_ones_come_often() -> None:
    tables = Tables(rows=1000, dim=4)
    for law, least, most in (("uniform", 0, 100), ("zipf", 1000, 20000)):
        features = drawn(tables, 512, 2, law, 0)
        values = features.values()
        assert len(values) == 26 * 512 * 2
        assert int(values.min()) >= 0 and int(values.max()) < 1000
        assert least < int(values.bincount().max()) < most


if __name__ == "__main__":
    main()

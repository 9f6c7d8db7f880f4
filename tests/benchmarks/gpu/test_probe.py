"""The whole probe on a CUDA without a GPU: its record, tables, time and exit code."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import memory, probe
from benchmarks.gpu.facts import sandbox
from benchmarks.gpu.registrations import WAYS
from benchmarks.gpu.runtime import Runtime
from benchmarks.gpu.table import problems, tables
from tests.benchmarks.gpu.fake_cuda import FakeCuda, Fault, quick_cuda
from tests.paths import ROOT

pytestmark = pytest.mark.full

SECONDS = 600.0
SIZES: dict[str, Any] = {
    "small": 2 * memory.HUGE,
    "large": 4 * memory.HUGE,
    "largest": 6 * memory.HUGE,
    "moved": [1 << 12, 1 << 14],
    "block_counts": [1, 2],
    "few_block_counts": [2],
    "windows": [2 * memory.HUGE],
    "side": 64,
}
STEPS = ["GPU", "facts", "registrations", "vmm", "second process", "gathers"]
STEPS += ["beside a GEMM", "large registrations", "large gathers"]


def run(open_runtime: Any, path: Path, seconds: float = SECONDS) -> tuple[int, dict[str, Any]]:
    code = probe.run(open_runtime, SIZES, seconds, path)
    return code, json.loads(path.read_text())


def test_all_steps_are_in_the_record_and_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = run(quick_cuda, tmp_path / "new" / "probe.json")
    printed = capsys.readouterr()
    assert code == 0, printed
    assert [(each["step"], each["outcome"]) for each in record["steps"]] == [
        (name, "done") for name in STEPS
    ]
    results = record["results"]
    assert not [each for cells in results.values() for each in cells if "failed" in each]
    assert [each["way"] for each in results["registrations"]] == 2 * list(WAYS)
    assert {each["way"] for each in results["second process"]} >= {"guarded"}
    assert {each["piece"] for each in results["large registrations"]} == {
        SIZES["small"],
        SIZES["large"],
    }
    gathers = [each for each in results["large gathers"] if each["what"] == "gather"]
    rows_and_bytes, windows_and_orders = 2 * 2, 2 * 3
    assert len(gathers) == rows_and_bytes * (windows_and_orders + 1)  # and other pages
    assert {each["window"] for each in gathers} == {2 * memory.HUGE, 6 * memory.HUGE}
    assert record["environment"]["versions"]["torch"] == torch.__version__
    assert "No row is wrong." in printed.out
    for title in ("What registers", "An owner that is killed", "Gathers from the host"):
        assert title in printed.out
    assert "| guarded | 2 MiB | " in printed.out
    assert "cudaHostRegister returned 801 (CUDA_ERROR_NOT_SUPPORTED)" in printed.out
    assert printed.err.count("done after") == len(STEPS)


@pytest.mark.slow
def test_memory_that_never_registers_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    always = Fault("cudaHostRegister", times=10**6)
    code, record = run(partial(quick_cuda, [always]), tmp_path / "probe.json")
    assert code == 1
    assert "FAILED: no host memory could be registered" in capsys.readouterr().out
    assert [each["step"] for each in record["steps"]] == STEPS  # the others were tried all the same


@pytest.mark.slow
def test_a_wrong_row_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run(partial(quick_cuda, wrong=True), tmp_path / "probe.json")
    assert code == 1
    assert "FAILED: gathers: 1 wrong rows in way guarded, what gather" in capsys.readouterr().out


def test_without_time_steps_are_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = run(FakeCuda, tmp_path / "probe.json", seconds=0)
    printed = capsys.readouterr().out
    assert code == 1
    assert record["results"]["GPU"] == [{"failed": "left out: no time was left"}]
    assert "no GPU could be used: left out: no time was left" in printed


def test_a_step_that_raises_costs_no_other(tmp_path: Path) -> None:
    def step(deadline: float) -> Iterator[dict[str, Any]]:
        yield {"what": "first"}
        raise ValueError("odd")

    made = probe.Probe(FakeCuda, SIZES, SECONDS, tmp_path / "probe.json")
    made._step("odd", 0, 60, step)
    made._step("late", SECONDS, 60, step)
    record = json.loads((tmp_path / "probe.json").read_text())
    assert record["results"]["odd"] == [{"what": "first"}, {"failed": "failed: ValueError: odd"}]
    assert record["results"]["late"] == [{"failed": "left out: no time was left"}]
    assert [each["outcome"] for each in record["steps"]] == [
        "failed: ValueError: odd",
        "left out: no time was left",
    ]


def test_the_largest_table_is_one_that_the_time_suffices_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = probe.Probe(FakeCuda, {**SIZES, "largest": 40 << 30}, SECONDS, None)
    costs = {"what": "table", "fill_s_per_gib": 2.0, "register_s_per_gib": 0.25}
    monkeypatch.setattr(made, "_cases", lambda work, cases, case_s, deadline: iter(cases))
    for fill_s, gib in ((2.0, 40), (4.5, 20)):  # of 5 and 10 s for a GiB in both kinds of pages
        made.results["gathers"] = [{**costs, "fill_s_per_gib": fill_s}] * 2
        (size,) = {each["size"] for each in made._large_gathers(time.monotonic() + 400)}
        assert 0.9 * gib <= size / 2**30 <= gib


def test_a_record_from_nothing_is_a_table() -> None:
    assert "odd, all of it: no" in tables({}, {"odd": [{"failed": "no"}]})


def test_wrong_rows_and_memory_that_never_registers_are_problems() -> None:
    assert problems({}) == ["no host memory could be registered"]
    refused: dict[str, Any] = {"way": "sealed", "error": "cudaHostRegister returned 1"}
    assert problems({"registrations": [refused]}) == ["no host memory could be registered"]
    registered = {"way": "guarded", "error": "", "rows": 9, "wrong_rows": 0}
    assert problems({"registrations": [refused, registered]}) == []
    gather = {"what": "gather", "blocks": 8, "rows": 9, "wrong_rows": 2}
    assert problems({"registrations": [registered], "gathers": [gather]}) == [
        "gathers: 2 wrong rows in what gather, blocks 8"
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_probe_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = run(Runtime, tmp_path / "probe.json")
    assert code == 1
    assert "FAILED: no GPU could be used: " in capsys.readouterr().out
    (failed,) = record["results"]["GPU"]
    assert "failed" in failed


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_program_says_so(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    command = [sys.executable, "-m", "benchmarks.gpu.probe", "--json", str(path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 1, ended
    assert "FAILED: no GPU could be used: " in ended.stdout
    assert "Traceback" not in ended.stderr
    (failed,) = json.loads(path.read_text())["results"]["GPU"]
    assert "failed" in failed


def test_a_gpu_runtime_needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            Runtime()


@pytest.mark.parametrize(
    ("release", "version", "vendor", "expected"),
    [
        ("6.18.44-fc-v310-gpu", "#1 SMP PREEMPT_DYNAMIC", None, "Firecracker"),
        ("4.4.0", "#1 SMP Sun Jan 10 15:06:54 PST 2016", None, "gVisor"),
        ("6.1.0-18-amd64", "#1 SMP Debian", "QEMU", "unknown (QEMU)"),
        ("6.1.0-18-amd64", "#1 SMP Debian", None, "unknown (no vendor)"),
    ],
)
def test_sandboxes_are_told_apart(
    release: str, version: str, vendor: str | None, expected: str
) -> None:
    assert sandbox(release, version, vendor) == expected

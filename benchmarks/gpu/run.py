"""What a GPU that reads the host's tables is worth, beside those who do the same job.

From the repository's root, on a host with a GPU where the package is installed:

    python3 -m benchmarks.gpu.run --json benchmarks/results/gpu.json

It ends within eight minutes, with tables. One process uses the GPU at a time. Its exit code is 1 if
a test has failed or a number is wrong. The file is written after each step.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.gpu import facts, lookups, promises
from benchmarks.gpu.children import LEFT_OUT, Case, Open
from benchmarks.gpu.runtime import Runtime
from benchmarks.gpu.steps import Steps
from benchmarks.gpu.table import Results, failed, machine
from benchmarks.harness import page

_GIB = 2**30
_TABLES_BYTES = 26 * 4  # of a row of one float in all tables
# Rows of 256 bytes of 10 GiB, of the goal; and of what fits beside it.
_CELLS = [*product((512, 2048), (1, 20), ("uniform", "zipf"))]


def settings() -> dict[str, Any]:
    """Rows of each table, samples of batches and numbers of turns."""

    def rows(gib: float, dim: int) -> int:
        return int(gib * _GIB / (_TABLES_BYTES * dim))

    return {
        "tables": [
            {"rows": rows(10, 64), "dim": 64, "stored": "float"},
            {"rows": rows(2, 128), "dim": 128, "stored": "float"},
            {"rows": rows(2, 32), "dim": 32, "stored": "float"},
            {"rows": rows(2, 64), "dim": 64, "stored": "int8"},
        ],
        "cells": _CELLS,
        "turns": 9,
        "waits": {"rows": rows(0.5, 64), "dim": 64, "batch": 512, "forwards": 1000},
        "graphs": {
            "rows": rows(0.5, 64),
            "dim": 64,
            "batch": 512,
            "width": 1024,
            "replays": 1000,
        },
        "gemms": {"rows": rows(1, 64), "dim": 64, "batch": 512, "side": 4096, "turns": 9},
        "versions": {
            "rows": rows(1, 64),
            "dim": 64,
            "batch": 512,
            "seconds": 2.0,
            "versions": 5,
        },
        # TorchRec's evaluation with tables on the CPU (its commit of #3824): a dense part that
        # takes several ms, and none.
        "evaluations": [
            {
                "rows": rows(4, 64),
                "dim": 64,
                "batch": 512,
                "ids": 20,
                "width": width,
                "steps": 100,
            }
            for width in (8192, 0)
        ],
    }


class Run(Steps):
    """The steps in the order of their importance."""

    name = "gpu"

    def run(self) -> list[str]:
        """Runs all steps and returns the problems, which make the exit code 1."""
        if why_not := self._why_no_gpu():
            return [why_not]
        sizes = self._sizes
        self._step("facts", 0, 40, partial(self._cases, facts.measure, [{}], 40))
        self._step("tests", 20, 150, self._tests)
        cells = {"cells": sizes["cells"], "turns": sizes["turns"]}
        tables = [{**each, **cells} for each in sizes["tables"]]
        self._step("lookups", 20, 240, partial(self._cases, lookups.measure, tables, 120))
        for name, work, case in (
            ("waits", promises.measure_waits, sizes["waits"]),
            ("graphs", promises.measure_graphs, sizes["graphs"]),
            ("beside GEMMs", promises.measure_beside_gemms, sizes["gemms"]),
            ("versions", promises.measure_versions, sizes["versions"]),
        ):
            self._step(name, 10, 60, partial(self._cases, work, [case], 60))
        evaluations = partial(self._cases, promises.measure_evaluation, sizes["evaluations"], 60)
        self._step("evaluation", 10, 80, evaluations)
        return problems(self.results)

    def _tests(self, deadline: float) -> Iterator[Case]:
        """The tests that only a GPU can run: bits, deaths, versions, bad ids."""
        command = [sys.executable, "-m", "pytest", "-q", "tests/gpu/test_on_a_gpu.py"]
        left = deadline - time.monotonic()
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=left)
        lines = ended.stdout.strip().splitlines() or [ended.stderr.strip()]
        found = {"what": "tests/gpu", "said": lines[-1]}
        yield found if ended.returncode == 0 else {**found, "failed": "\n".join(lines[-30:])}


def problems(results: Results) -> list[str]:
    """Why the run has failed: a step did, a number was wrong, or the host waited. Tables in HBM,
    and a peer that is not there, are no part of that."""
    found = []
    for step, cells in results.items():
        for each in cells:
            why = each.get("failed", "")
            if why and step != "evaluation" and not why.startswith(LEFT_OUT):
                found.append(f"{step}: {why}")
            wrong = each.get("wrong_numbers", 0) + each.get("wrong_rows", 0)
            if wrong:
                found.append(f"{step}: {wrong} wrong in {each['what']}, {_cell(each)}")
    return found


def tables(environment: dict[str, Any], results: Results) -> str:
    """All tables, with a line for what failed or was left out."""
    parts = [
        ("What it ran on", machine(environment, results.get("facts", []))),
        ("Lookups, us (times as long as ours)", _lookups(results.get("lookups", []))),
        ("Who was not there", _lacking(results.get("lookups", []))),
        *(
            (name.capitalize(), _listed(results.get(name, [])))
            for name in ("tests", "waits", "graphs", "beside GEMMs", "versions", "evaluation")
        ),
        ("Failed or left out", failed(results)),
    ]
    return "\n\n".join(f"{title}\n\n{text}" for title, text in parts if text)


def _lookups(cells: Sequence[Case]) -> str:
    """A row for each cell, and a column for each peer."""
    timed = [each for each in cells if "us" in each]
    names = list(dict.fromkeys(each["what"] for each in timed))
    by_cell: dict[str, dict[str, float]] = {}
    for each in timed:
        by_cell.setdefault(_cell(each), {})[each["what"]] = each["us"]["median"]
    rows = []
    for cell, us in by_cell.items():
        ours = us.get(lookups.OURS)
        rows.append([cell, *(_beside(us.get(name), ours) for name in names)])
    return page.table(["cell", *names], rows) if rows else ""


def _beside(us: float | None, ours: float | None) -> str:
    if us is None:
        return ""
    return f"{us:.0f} ({us / ours:.2f})" if ours else f"{us:.0f}"


def _cell(each: Case) -> str:
    shown = ("stored", "dim", "rows", "batch", "ids", "law", "width")
    return ", ".join(f"{key} {each[key]}" for key in shown if key in each)


def _lacking(cells: Sequence[Case]) -> str:
    rows = {(each["what"], each["lacks"]) for each in cells if "lacks" in each}
    return "\n".join(f"- {name}: {why}" for name, why in sorted(rows))


def _listed(cells: Sequence[Case]) -> str:
    lines = []
    for each in cells:
        known = {key: value for key, value in each.items() if key not in ("what", "failed")}
        told = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in known.items()
        )
        if "what" in each and "failed" not in each:
            lines.append(f"- {each['what']}: {told}")
    return "\n".join(lines)


def run(open_runtime: Open, sizes: dict[str, Any], seconds: float, path: Path | None) -> int:
    """Runs all, prints its tables, and returns the exit code."""
    made = Run(open_runtime, sizes, seconds, path)
    found = made.run()
    print(tables(made.environment, made.results))
    print("\n" + "\n".join(f"FAILED: {each}" for each in found) if found else "\nNothing is wrong.")
    return 1 if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the record to this file")
    parser.add_argument("--seconds", type=float, default=480, help="what the run may take")
    arguments = parser.parse_args()
    sys.exit(run(Runtime, settings(), arguments.seconds, arguments.json))


if __name__ == "__main__":
    main()

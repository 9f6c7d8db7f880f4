"""The evaluation of the BLS paper (Dichev et al., sec. VI) on one host, figure by figure.

See README.md in this folder for what is compared and how, docs/reproduction/bls.md for the outcome.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import alltoall_native as native
from alltoall_python import Ranks
from common import ROOT, environment
from paper_bls_alltoall import measure_repetitions, measure_sizes
from paper_bls_figures import draw
from paper_bls_ranks import launch
from paper_bls_report import tables

BOUNDS = (0, 1, 2, 4)
#: 8 ranks with 128 rows each send it for 26 tables of dimension 64 in fp32 (delays.py).
PAIR_KIB = 104
ALLTOALL: dict[str, Callable[[int, dict[str, Any], Ranks], list[dict[str, Any]]]] = {
    "fig6a": measure_sizes,
    "fig6b": measure_repetitions,
}


@dataclass(frozen=True)
class Stage:
    """One figure at one number of ranks.

    Attributes:
        name: figure and ranks.
        figure: key of ALLTOALL, or a name.
        work: what the ranks do, for those that are not in ALLTOALL (`paper_bls_ranks`).
        ranks: number of processes.
        settings: of the measurement.
    """

    name: str
    figure: str
    work: str | None
    ranks: int
    settings: dict[str, Any]


def stages(quick: bool, data: Path | None) -> list[Stage]:
    """All stages, those of equal ranks one after the other."""
    runs = 2 if quick else 5
    bounds = (0, 2) if quick else BOUNDS
    windows = {"bounds": bounds, "runs": runs, "steps": 10 if quick else 100}
    short = {**windows, "steps": 10 if quick else 50}
    sizes = (8, 4 << 10) if quick else (8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20)
    lengths = (1, 10) if quick else (1, 10, 100, 1000, 10_000, 100_000)
    rows = str(data) if data else None
    works: dict[str, tuple[str | None, dict[str, Any]]] = {
        "fig6a": (None, {"runs": runs, "seconds": 0.02 if quick else 0.05, "sizes": sizes}),
        "fig6b": (None, {"runs": runs, "bytes": 32 << 10, "lengths": lengths, "longest": 15.0}),
        "fig7-delays": (
            "exchange",
            {**windows, "max_delay": 0.010, "dense": 0.005, "kib": (PAIR_KIB, PAIR_KIB)},
        ),
        "fig7-sizes": ("exchange", {**short, "max_delay": 0.0, "dense": 0.0, "kib": (2, 200)}),
        "fig7-dlrm-delays": ("dlrm", {**windows, "rows": 16, "max_delay": 0.010, "data": rows}),
        "fig7-dlrm-ids": ("dlrm", {**short, "rows": 16, "max_ids": 100}),
        "fig8": ("dlrm", {**short, "rows": 64, "data": rows}),
        "table1": ("overlap", {"bound": 2, "runs": 1 if quick else 3}),
    }
    figures = {4: list(works)} if quick else {2: ["fig8"], 4: list(works), 8: list(works)}
    return [
        Stage(f"{figure}-{ranks}", figure, works[figure][0], ranks, works[figure][1])
        for ranks, of_ranks in figures.items()
        for figure in of_ranks
    ]


class Record:
    """The results so far, in a file that is written after each stage."""

    def __init__(self, path: Path) -> None:
        """Reads what `path` holds, if it is there."""
        self._path = path
        self.stages: dict[str, Any] = {}
        if path.exists():
            self.stages = json.loads(path.read_text())["stages"]

    def add(self, stage: Stage, started_in: dict[str, Any], results: Any) -> None:
        """Keeps a stage's results."""
        self.stages[stage.name] = {
            "environment": started_in,
            "settings": stage.settings,
            "results": results,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        record = {"benchmark": "paper_bls", "stages": self.stages}
        self._path.write_text(json.dumps(record, indent=1) + "\n")


def measure(todo: list[Stage], record: Record, mpi: bool) -> None:
    """Runs stages; processes are started once for all that have the same ranks."""
    for ranks in sorted({stage.ranks for stage in todo}):
        of_ranks = {stage.name: stage for stage in todo if stage.ranks == ranks}
        alone = [stage for stage in of_ranks.values() if stage.work is None]
        if alone:
            with Ranks(ranks) as pool:
                for stage in alone:
                    before = environment()
                    results = ALLTOALL[stage.figure](ranks, stage.settings, pool)
                    record.add(stage, before, results)
        tasks = [(s.name, s.work, s.settings) for s in of_ranks.values() if s.work is not None]
        if tasks:
            before = environment()
            for name, results in launch(ranks, tasks, mpi):
                record.add(of_ranks[name], before, results)


def main() -> None:
    """Measures what the record lacks, or what the command line names, and reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "paper_bls", help="folder")
    parser.add_argument("--quick", action="store_true", help="4 ranks, few and short runs")
    parser.add_argument("--data", type=Path, help="Criteo rows; without, generated ones")
    parser.add_argument(
        "--only", nargs="+", help="measure these (again): figures, or figures and ranks (fig8-4)"
    )
    arguments = parser.parse_args()
    known = stages(arguments.quick, arguments.data)
    if arguments.data is not None and not arguments.data.exists():
        parser.error(f"--data {arguments.data}: there is no such file")
    names = {name for stage in known for name in (stage.figure, stage.name)}
    if unknown := set(arguments.only or ()) - names:
        parser.error(f"--only {' '.join(sorted(unknown))}: expected some of {sorted(names)}")

    record = Record(arguments.out / "paper_bls.json")
    if arguments.only:
        todo = [s for s in known if {s.figure, s.name} & set(arguments.only)]
    else:
        todo = [s for s in known if s.name not in record.stages]
    print(f"{len(known) - len(todo)} stages are there or not asked for, {len(todo)} to measure")
    native.build()
    mpi = native.mpi_version() is not None and importlib.util.find_spec("mpi4py") is not None
    if not mpi:
        print("Open MPI is left out: it needs mpirun, libopenmpi-dev and mpi4py")
    if arguments.data is None:
        print("Criteo rows are left out: no --data; the DLRM runs on generated rows")
    measure(todo, record, mpi)
    text = tables(record.stages)
    print(text)
    (arguments.out / "results.md").write_text(text + "\n")
    draw(arguments.out, record.stages)


if __name__ == "__main__":
    sys.exit(main())

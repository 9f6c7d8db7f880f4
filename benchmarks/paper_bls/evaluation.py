"""The evaluation of the BLS paper (Dichev et al., sec. VI) on one host, figure by figure."""

import importlib.util
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ROOT
from benchmarks.delays.exchanges import PAIR_KIB
from benchmarks.exchange import native
from benchmarks.exchange.alltoall import measure_repetitions, measure_sizes
from benchmarks.harness import record
from benchmarks.harness.launch import on_ranks
from benchmarks.paper_bls.page import draw, section, summarize
from benchmarks.paper_bls.ranks import launch

BOUNDS = (0, 1, 2, 4)
ALLTOALL = {"sizes": measure_sizes, "repetitions": measure_repetitions}


class Stage(NamedTuple):
    """One figure at one number of ranks; `work` is a key of ALLTOALL or of `ranks.WORKS`."""

    ranks: int
    work: str
    settings: dict[str, Any]


def stages(quick: bool, data: Path | None) -> dict[str, Stage]:
    """All stages by figure and ranks, those of equal ranks one after the other."""
    runs = 2 if quick else 5
    bounds = (0, 2) if quick else BOUNDS
    windows = {"bounds": bounds, "runs": runs, "steps": 10 if quick else 100}
    short = {**windows, "steps": 10 if quick else 50}
    sizes = (8, 4 << 10) if quick else (8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20)
    lengths = (1, 10) if quick else (1, 10, 100, 1000, 10_000, 100_000)
    trains = {"lengths": lengths, "longest": 15.0}
    late = {"max_delay": 0.010}
    asleep = {**late, "dense": 0.005, "kib": (PAIR_KIB, PAIR_KIB)}
    awake = {"max_delay": 0.0, "dense": 0.0, "kib": (2, 200)}
    rows = {"data": str(data) if data else None}
    works: dict[str, tuple[str, dict[str, Any]]] = {
        "fig6a": ("sizes", {"runs": runs, "seconds": 0.02 if quick else 0.05, "sizes": sizes}),
        "fig6b": ("repetitions", {"runs": runs, "bytes": 32 << 10, **trains}),
        "fig7-delays": ("windows", {**windows, **asleep}),
        "fig7-sizes": ("windows", {**short, **awake}),
        "fig7-dlrm-delays": ("dlrm", {**windows, **late, **rows, "rows": 16}),
        "fig7-dlrm-ids": ("dlrm", {**short, "rows": 16, "max_ids": 100}),
        "fig8": ("dlrm", {**short, **rows, "rows": 64}),
        "table1": ("overlap", {"bound": 2, "runs": 1 if quick else 3}),
    }
    figures = {4: list(works)} if quick else {2: ["fig8"], 4: list(works), 8: list(works)}
    return {
        f"{figure}-{ranks}": Stage(ranks, *works[figure])
        for ranks, of_ranks in figures.items()
        for figure in of_ranks
    }


def measure(todo: dict[str, Stage], into: record.Resumable, mpi: bool) -> None:
    """Runs stages and keeps their results; processes serve all works that have the same ranks."""

    def keep(before: dict[str, Any], name: str, results: Any) -> None:
        measured = {"environment": before, "settings": todo[name].settings, "results": results}
        into.raw["stages"][name] = measured
        into.write()

    for ranks, names in groupby(todo, lambda name: todo[name].ranks):
        tasks = []
        for name in names:
            _, work, settings = todo[name]
            if work in ALLTOALL:
                before = record.environment()
                keep(before, name, on_ranks(ranks, ALLTOALL[work], ranks, settings))
            else:
                tasks.append((name, work, settings))
        if tasks:
            launch(ranks, tasks, mpi, partial(keep, record.environment()))


def main() -> None:
    """Measures what the record lacks, or what the command line names, and reports."""
    parser = record.parser(__doc__, quick="4 ranks, few and short runs")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "paper_bls", help="folder")
    parser.add_argument("--data", type=Path, help="Criteo rows; without, generated ones")
    names = {each for name in stages(False, None) for each in (name, name.rpartition("-")[0])}
    again = "measure these (again): figures, or figures and ranks (fig8-4)"
    parser.add_argument("--only", nargs="+", choices=sorted(names), metavar="FIGURE", help=again)
    arguments = parser.parse_args()
    known = stages(arguments.quick, arguments.data)
    if arguments.data is not None and not arguments.data.exists():
        parser.error(f"--data {arguments.data}: there is no such file")

    path = arguments.json or arguments.out / "paper_bls.json"
    into = record.Resumable(path, {"benchmark": "paper_bls", "stages": {}}, summarize)
    wanted = set(arguments.only or known.keys() - into.raw["stages"].keys())
    todo = {name: s for name, s in known.items() if {name, name.rpartition("-")[0]} & wanted}
    print(f"{len(known) - len(todo)} stages are there or not asked for, {len(todo)} to measure")
    native.build()
    mpi = native.mpi_version() is not None and importlib.util.find_spec("mpi4py") is not None
    if not mpi:
        print("Open MPI is left out: it needs mpirun, libopenmpi-dev and mpi4py")
    if arguments.data is None:
        print("Criteo rows are left out: no --data; the DLRM runs on generated rows")
    measure(todo, into, mpi)
    summary = record.read(path)
    print(text := section(summary))
    (arguments.out / "results.md").write_text(text + "\n")
    draw(arguments.out, summary)


if __name__ == "__main__":
    main()

"""The evaluation of the BLS paper (Dichev et al., sec. VI) on one host, figure by figure."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ROOT
from benchmarks.exchange import native
from benchmarks.exchange.python_ranks import Ranks
from benchmarks.harness import record
from benchmarks.paper_bls.alltoall import measure_repetitions, measure_sizes
from benchmarks.paper_bls.figures import draw
from benchmarks.paper_bls.page import section, summarize
from benchmarks.paper_bls.ranks import launch

BOUNDS = (0, 1, 2, 4)
#: 8 ranks with 128 rows each send it for 26 tables of dimension 64 in fp32.
PAIR_KIB = 104
ALLTOALL: dict[str, Callable[[int, dict[str, Any], Ranks], list[dict[str, Any]]]] = {
    "fig6a": measure_sizes,
    "fig6b": measure_repetitions,
}


class Stage(NamedTuple):
    """One figure at one number of ranks.

    Attributes:
        figure: key of ALLTOALL, or a name.
        work: what the ranks do, for those that are not in ALLTOALL (`ranks.py`).
        ranks: number of processes.
        settings: of the measurement.
    """

    figure: str
    work: str | None
    ranks: int
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """Figure and ranks."""
        return f"{self.figure}-{self.ranks}"


def stages(quick: bool, data: Path | None) -> list[Stage]:
    """All stages, those of equal ranks one after the other."""
    runs = 2 if quick else 5
    bounds = (0, 2) if quick else BOUNDS
    windows = {"bounds": bounds, "runs": runs, "steps": 10 if quick else 100}
    short = {**windows, "steps": 10 if quick else 50}
    sizes = (8, 4 << 10) if quick else (8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20)
    lengths = (1, 10) if quick else (1, 10, 100, 1000, 10_000, 100_000)
    late = {"max_delay": 0.010}
    asleep = {**late, "dense": 0.005, "kib": (PAIR_KIB, PAIR_KIB)}
    awake = {"max_delay": 0.0, "dense": 0.0, "kib": (2, 200)}
    rows = {"data": str(data) if data else None}
    works: dict[str, tuple[str | None, dict[str, Any]]] = {
        "fig6a": (None, {"runs": runs, "seconds": 0.02 if quick else 0.05, "sizes": sizes}),
        "fig6b": (None, {"runs": runs, "bytes": 32 << 10, "lengths": lengths, "longest": 15.0}),
        "fig7-delays": ("windows", {**windows, **asleep}),
        "fig7-sizes": ("windows", {**short, **awake}),
        "fig7-dlrm-delays": ("dlrm", {**windows, **late, **rows, "rows": 16}),
        "fig7-dlrm-ids": ("dlrm", {**short, "rows": 16, "max_ids": 100}),
        "fig8": ("dlrm", {**short, **rows, "rows": 64}),
        "table1": ("overlap", {"bound": 2, "runs": 1 if quick else 3}),
    }
    figures = {4: list(works)} if quick else {2: ["fig8"], 4: list(works), 8: list(works)}
    return [
        Stage(figure, works[figure][0], ranks, works[figure][1])
        for ranks, of_ranks in figures.items()
        for figure in of_ranks
    ]


class Stages:
    """The results so far, whose samples are written after each stage."""

    def __init__(self, path: Path) -> None:
        """Reads the samples of the record `path`, if they are there."""
        self._path = path
        raw = record.raw_path(path)
        self.done: dict[str, Any] = record.read_raw(raw)["stages"] if raw.exists() else {}

    def add(self, stage: Stage, started_in: dict[str, Any], results: Any) -> None:
        """Keeps a stage's results."""
        measured = {"environment": started_in, "settings": stage.settings, "results": results}
        self.done[stage.name] = measured
        raw = {"benchmark": "paper_bls", "stages": self.done}
        record.write_raw(record.raw_path(self._path), raw)
        record.write_summary(self._path, summarize(raw))


def measure(todo: list[Stage], into: Stages, mpi: bool) -> None:
    """Runs stages; processes are started once for all that have the same ranks."""
    for ranks in sorted({stage.ranks for stage in todo}):
        of_ranks = {stage.name: stage for stage in todo if stage.ranks == ranks}
        alone = [stage for stage in of_ranks.values() if stage.work is None]
        if alone:
            with Ranks(ranks) as pool:
                for stage in alone:
                    before = record.environment()
                    into.add(stage, before, ALLTOALL[stage.figure](ranks, stage.settings, pool))
        tasks = [(s.name, s.work, s.settings) for s in of_ranks.values() if s.work is not None]
        if tasks:
            before = record.environment()
            for name, results in launch(ranks, tasks, mpi):
                into.add(of_ranks[name], before, results)


def main() -> None:
    """Measures what the record lacks, or what the command line names, and reports."""
    parser = record.parser(__doc__, quick="4 ranks, few and short runs")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "paper_bls", help="folder")
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

    path = arguments.json or arguments.out / "paper_bls.json"
    into = Stages(path)
    if arguments.only:
        todo = [s for s in known if {s.figure, s.name} & set(arguments.only)]
    else:
        todo = [s for s in known if s.name not in into.done]
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

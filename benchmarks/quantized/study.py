"""Tables 2, 3 and 4 of Quantized Collectives: what quantized messages cost a DLRM in accuracy.

A study that was stopped goes on where it was.
"""

import argparse
import multiprocessing
import os
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.harness import record
from benchmarks.quantized.cells import BASELINE, Cell, all_cells
from benchmarks.quantized.page import plot, section
from benchmarks.quantized.summary import summarize
from benchmarks.quantized.training import Source, train

# Nine tenths of the time are for the planted clicks.
ITERATIONS = 112
SEEDS = 4
BATCH_SIZE = 1024
TEST_ROWS = 1 << 16
# A batch of the 2,000 rows of criteo-tiny; a sample for each of 128 nodes.
SMALL_BATCH = 128

Task = tuple[Source, Cell, int]


class StudyError(Exception):
    """The study cannot go on; the text says why."""


def sources(arguments: argparse.Namespace) -> list[Source]:
    """Returns the sets of samples that are there."""
    iterations = max(1, round(ITERATIONS * arguments.scale))
    rows = arguments.table_rows
    if arguments.quick:
        return [Source("planted", 2, SMALL_BATCH, 4096, 100)]
    found = [Source("planted", iterations, BATCH_SIZE, TEST_ROWS, rows)]
    movielens, sample = arguments.data / "ml-100k", arguments.data / "criteo-tiny" / "train.csv"
    if movielens.is_dir():
        found.append(Source("ml-100k", iterations, BATCH_SIZE, 0, rows, str(movielens)))
    if sample.is_file():
        found.append(Source("criteo-tiny", iterations, SMALL_BATCH, 0, rows, str(sample)))
    if arguments.criteo is not None:
        found.append(Source("criteo", iterations, BATCH_SIZE, 0, rows, str(arguments.criteo)))
    return found


def cells_of(source: Source, quick: bool) -> list[Cell]:
    """Returns what is trained on a source. Cells of many nodes cost the most, and small sets tell
    little about them."""
    cells = all_cells()
    if quick:
        return [cell for cell in cells if cell.collectives.nodes <= 32]
    if source.name == "ml-100k":
        return [cell for cell in cells if cell.collectives.nodes <= 32]
    if source.name == "criteo-tiny":
        return [cell for cell in cells if cell.collectives.nodes == 1]
    return cells


class Study:
    """The study's record, whose samples are written anew after each cell.

    Args:
        path: of the summary.
        settings: of the study.

    Raises:
        StudyError: the record is of a study with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path = path
        self._raw: dict[str, Any] = {"benchmark": "quantized", "environment": record.environment()}
        self._raw |= {"settings": settings, "results": []}
        if (raw := record.raw_path(path)).exists():
            self._raw = record.read_raw(raw)
            if self._raw["settings"] != settings:
                raise StudyError(
                    f"{raw} has a study with the settings {self._raw['settings']}, not "
                    f"{settings}: remove it, or write to another file"
                )
        self._results = {self._key(result): result for result in self._raw["results"]}

    def find(self, task: Task) -> dict[str, Any] | None:
        """Returns the result of a task that is done."""
        source, cell, seed = task
        return self._results.get((source.name, cell.key, seed))

    def add(self, result: dict[str, Any]) -> None:
        """Adds a result and writes the record."""
        self._results[self._key(result)] = result
        self._raw["results"].append(result)
        self._write()

    def finish(self) -> None:
        """Drops the baselines' decisions, which only cells that are not trained yet need."""
        for result in self._raw["results"]:
            result.pop("decisions", None)
        self._write()

    def _write(self) -> None:
        record.write_raw(record.raw_path(self._path), self._raw)
        record.write_summary(self._path, summarize(self._raw))

    @staticmethod
    def _key(result: dict[str, Any]) -> tuple[str, str, int]:
        return result["source"], result["cell"], result["seed"]


def run(study: Study, tasks: list[Task], workers: int) -> None:
    """Trains what is not in the record yet, baselines first, which the others are compared with."""
    left = [task for task in tasks if study.find(task) is None]
    progress = tqdm(total=len(tasks), initial=len(tasks) - len(left), desc="cells", mininterval=1)
    # One BLAS thread a worker from the start: they share the cores among themselves.
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _end_with_parent) as pool, progress:
        for wave in (
            [task for task in left if task[1].row == BASELINE],
            [task for task in left if task[1].row != BASELINE],
        ):
            running = [pool.submit(train, *task, _decisions(study, task)) for task in wave]
            try:
                for finished in as_completed(running):
                    study.add(finished.result())
                    progress.update()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _end_with_parent() -> None:
    """Makes a worker end when the study is killed, instead of training on."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _decisions(study: Study, task: Task) -> str | None:
    source, cell, seed = task
    if cell.row == BASELINE:
        return None
    baseline = study.find((source, all_cells()[0], seed))
    assert baseline is not None
    text: str = baseline["decisions"]
    return text


def main() -> int:
    """Runs the study."""
    parser = record.parser(__doc__, quick="two iterations, one seed, 32 nodes")
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder of ml-100k, criteo-tiny"
    )
    parser.add_argument("--criteo", type=Path, help="train.txt of Criteo's challenge")
    parser.add_argument("--scale", type=float, default=1.0, help="times the iterations")
    parser.add_argument("--table-rows", type=int, default=10_000, help="of a table at most")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread")
    arguments = parser.parse_args()
    path = arguments.json or Path("out/study-quantized.json")
    found = sources(arguments)
    seeds = 1 if arguments.quick else SEEDS
    tasks = [
        (source, cell, seed)
        for source in found
        for seed in range(seeds)
        for cell in cells_of(source, arguments.quick)
    ]
    settings = {"seeds": seeds, "sources": [asdict(source) for source in found]}
    # Where a set lies does not change what is found in it.
    for source in settings["sources"]:
        del source["path"]
    try:
        study = Study(path, settings)
        run(study, tasks, arguments.workers)
    except StudyError as error:
        print(error, file=sys.stderr)
        return 1
    study.finish()
    page, figure = path.with_suffix(".md"), path.with_suffix(".png")
    summary = record.read(path)
    page.write_text(section(summary) + "\n")
    plot(figure, summary)
    print(f"{len(tasks)} cells in {path}, as tables in {page}, as a figure in {figure}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

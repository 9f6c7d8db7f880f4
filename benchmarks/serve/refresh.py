"""The service under load while whole new checkpoints come every some seconds.

Each answer is compared afterwards with what TorchRec computes, unsharded, from the version that the
answer names. A second run has no refreshes: there another process on the service's core reads each
checkpoint into new memory, which is the least that a refresh has to do.
"""

import contextlib
import mmap
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import record
from benchmarks.serve import model, shape
from benchmarks.serve.answers import compared
from benchmarks.serve.generator import Generator
from benchmarks.serve.outcome import PERCENTILES, REFUSALS, Outcome
from benchmarks.serve.page import refresh_section
from benchmarks.serve.service import GENERATOR_CORE, SERVER_CORE, served

# Different weights that take turns: one more than a service holds at once.
_DIFFERENT = 3
_STEP = 4 << 20
FULL = {
    **{"rows": shape.ROWS, "deadline_s": shape.DEADLINE_S, "options": []},
    **{"seconds": 300.0, "every_s": 10.0, "warm_s": 5.0},
}
# With time enough on a machine that does other things.
QUICK = {
    **{"rows": shape.QUICK_ROWS, "deadline_s": 5.0, "options": ["--no-compile"]},
    **{"seconds": 5.0, "every_s": 1.5, "warm_s": 0.5},
}


class Writer(threading.Thread):
    """Puts a copy of a checkpoint into a directory every some seconds, and keeps the newest few.

    Args:
        sources: checkpoints that take turns, from the second one on.
        directory: where the copies go, "v1" and on.
        every_s: seconds from one to the next; the first comes after as many.
        tell: called with the path of each copy.

    Attributes:
        written: how many copies.
    """

    def __init__(
        self,
        sources: list[Path],
        directory: Path,
        every_s: float,
        tell: Callable[[Path], None],
    ) -> None:
        super().__init__(daemon=True)
        self.written = 0
        self._sources, self._directory = sources, directory
        self._every_s, self._tell = every_s, tell
        self._end = threading.Event()

    def run(self) -> None:
        os.sched_setaffinity(0, {GENERATOR_CORE})
        begin = time.monotonic()
        while True:
            number = self.written + 1
            if self._end.wait(max(0.0, begin + number * self._every_s - time.monotonic())):
                return
            copy = self._directory / f"v{number}"
            copied(self._sources[number % len(self._sources)], copy)
            self.written = number
            if number > _DIFFERENT:
                shutil.rmtree(self._directory / f"v{number - _DIFFERENT}")
            self._tell(copy)

    def end(self) -> None:
        self._end.set()
        self.join()


def copied(source: Path, target: Path) -> None:
    """Copies a checkpoint, which is at its place once it is whole."""
    unfinished = target.with_name(f".{target.name}.new")
    # Newest is what was written last, so without the times of the source.
    shutil.copytree(source, unfinished, copy_function=shutil.copyfile)
    unfinished.rename(target)


def _copy(connection: Any) -> None:
    """Reads each checkpoint that it is told of into new memory, and keeps the last one."""
    os.sched_setaffinity(0, {SERVER_CORE})
    os.nice(10)  # as the keeper of a service
    while True:
        files = [path for path in Path(connection.recv()).iterdir() if path.is_file()]
        memory = mmap.mmap(-1, sum(path.stat().st_size for path in files))
        for path in files:
            with path.open("rb") as file:
                while step := file.read(_STEP):
                    memory.write(step)


@contextlib.contextmanager
def copier() -> Iterator[Callable[[Path], None]]:
    """A process that copies what it is told of."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_copy, args=(there,), daemon=True)
    process.start()
    try:
        yield lambda path: here.send(str(path))
    finally:
        process.kill()
        process.join()


def loaded(
    build: str,
    folder: Path,
    sources: list[Path],
    settings: dict[str, Any],
    watched: bool,
) -> tuple[Outcome, int]:
    """A run during which checkpoints come, and how many."""
    directory = folder / ("watched" if watched else "beside")
    directory.mkdir()
    options = [*settings["options"], *(["--watch", str(directory)] if watched else [])]
    with (
        served(build, sources[0], *options) as service,
        contextlib.nullcontext(lambda path: None) if watched else copier() as tell,
        Generator(service.load(settings["rows"], settings["deadline_s"])) as generator,
    ):
        generator.run(settings["rate"], settings["warm_s"])
        writer = Writer(sources, directory, settings["every_s"], tell)
        writer.start()
        outcome = generator.run(settings["rate"], settings["seconds"], seed=1, keep=watched)
        writer.end()
    shutil.rmtree(directory)
    wanted = int(settings["seconds"] / settings["every_s"])
    if writer.written < wanted - 1:
        raise RuntimeError(
            f"only {writer.written} of {wanted} checkpoints were written in time: let nothing else "
            "use the disk, or give the system a faster one"
        )
    return outcome, writer.written


def _figures(outcome: Outcome) -> dict[str, Any]:
    answers = {f"p{percent:g}": outcome.latency_ms(percent, 200) for percent in PERCENTILES}
    return {
        "offered": outcome.offered,
        "in_time": outcome.in_time,
        "late": outcome.late,
        "refused": outcome.refused,
        "failed": outcome.failed,
        "answers_ms": answers,
        "refusals_p99_ms": outcome.latency_ms(99, *REFUSALS),
        "lag_p99_ms": outcome.lag_p99_ms,
        "server_cores": outcome.server_s / outcome.seconds,
    }


def measure(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Both runs, and the comparison of the answers."""
    rows, int8 = settings["rows"], settings["tables"] == "INT8"
    sources = [folder / f"first-{seed}" for seed in range(_DIFFERENT)]
    for seed, source in enumerate(sources):
        model.write_checkpoint(source, rows, seed)
    build = model.BUILDS[rows][settings["tables"]]
    beside, _ = loaded(build, folder, sources, settings, watched=False)
    refreshed, written = loaded(build, folder, sources, settings, watched=True)
    # The first checkpoint serves until the first copy does.
    sources_of = {f"v{number}": sources[number % _DIFFERENT] for number in range(1, written + 1)}
    checkpoints = {sources[0].name: sources[0], **sources_of}
    return {
        "refreshed": _figures(refreshed),
        "beside": _figures(beside),
        "written": written,
        **compared(refreshed.kept, checkpoints, rows, int8),
    }


def main() -> None:
    made = record.parser(__doc__, quick="small tables, some seconds")
    made.add_argument("--rate", type=float, required=True, help="requests a second")
    made.add_argument("--int8", action="store_true", help="INT8 tables")
    arguments = made.parse_args()
    settings: dict[str, Any] = dict(QUICK if arguments.quick else FULL)
    settings |= {"tables": "INT8" if arguments.int8 else "float", "rate": arguments.rate}
    before = record.environment()
    with tempfile.TemporaryDirectory(prefix="bls-serve-") as name:
        results = measure(Path(name), settings)
    record.publish(arguments.json, "serving_refreshes", before, settings, results, refresh_section)
    if results["wrong"] or results["refreshed"]["failed"]:
        raise SystemExit("answers differ from those of the version that they name, or are missing")


if __name__ == "__main__":
    main()

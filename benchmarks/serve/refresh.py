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
from benchmarks.serve.generator import Generator, Load, open_inference
from benchmarks.serve.outcome import PERCENTILES, REFUSALS, Outcome, table
from benchmarks.serve.page import refresh_section
from benchmarks.serve.service import GENERATOR_CORE, SERVER_CORE, served

# Different weights that take turns: one more than a service holds at once.
_DIFFERENT = 3
_STEP = 4 << 20


class Writer(threading.Thread):
    """Puts a copy of a checkpoint into a directory every some seconds, and keeps the newest few.

    Args:
        sources: checkpoints that take turns, from the second one on.
        directory: where the copies go, "v1" and on.
        every_s: seconds from one to the next; the first comes after as many.
        written: called with the path of each copy.

    Attributes:
        names: of all copies.
    """

    def __init__(
        self,
        sources: list[Path],
        directory: Path,
        every_s: float,
        written: Callable[[Path], None],
    ) -> None:
        super().__init__(daemon=True)
        self.names: list[str] = []
        self._sources, self._directory = sources, directory
        self._every_s, self._written = every_s, written
        self._end = threading.Event()

    def run(self) -> None:
        begin = time.monotonic()
        while True:
            number = len(self.names) + 1
            if self._end.wait(max(0.0, begin + number * self._every_s - time.monotonic())):
                return
            copy = self._directory / f"v{number}"
            copied(self._sources[number % len(self._sources)], copy)
            self.names.append(copy.name)
            if number > _DIFFERENT:
                shutil.rmtree(self._directory / f"v{number - _DIFFERENT}")
            self._written(copy)

    def end(self) -> None:
        self._end.set()
        self.join()


def copied(source: Path, target: Path) -> None:
    """Copies a checkpoint, which is at its place once it is whole."""
    unfinished = target.with_name(f".{target.name}.new")
    shutil.copytree(source, unfinished)
    unfinished.rename(target)


def _copy(connection: Any) -> None:
    """Reads each checkpoint that it is told of into new memory, and keeps the last one."""
    os.sched_setaffinity(0, {SERVER_CORE})
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
) -> tuple[Outcome, list[str]]:
    """A run during which checkpoints come; the names of those."""
    directory = folder / ("watched" if watched else "beside")
    directory.mkdir()
    options = ["--watch", str(directory)] if watched else []
    with (
        served(build, sources[0], *options) as service,
        contextlib.nullcontext(lambda path: None) if watched else copier() as tell,
    ):
        load = Load(
            service.url,
            open_inference(service.url),
            settings["rows"],
            GENERATOR_CORE,
            servers=service.processes,
        )
        with Generator(load) as generator:
            generator.run(settings["rate"], settings["warm_s"])
            writer = Writer(sources, directory, settings["every_s"], tell)
            writer.start()
            outcome = generator.run(settings["rate"], settings["seconds"], seed=1, keep=watched)
            writer.end()
    shutil.rmtree(directory)
    return outcome, writer.names


def _figures(outcome: Outcome) -> dict[str, Any]:
    return {
        "offered": outcome.offered,
        "in_time": outcome.in_time,
        "late": outcome.late,
        "refused": outcome.refused,
        "failed": outcome.failed,
        "answers_ms": {f"p{percent:g}": outcome.latency_ms(percent, 200) for percent in PERCENTILES},
        "refusals_p99_ms": outcome.latency_ms(99, *REFUSALS),
        "lag_p99_ms": outcome.lag_p99_ms,
        "server_cores": outcome.server_s / outcome.seconds,
    }

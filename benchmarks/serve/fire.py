"""The service with two workers while its processes die, stand still, or are replaced.

Each answer is compared afterwards with what TorchRec computes, unsharded, from the version that it
names. Lost are requests that got a reset, a truncated or wrong response, a status of 5xx but 503
and 504, or nothing within 2 s. Both workers have both cores, and the generator takes what it needs
of one.
"""

import functools
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import record
from benchmarks.serve import model, shape
from benchmarks.serve.answers import compared
from benchmarks.serve.generator import Generator
from benchmarks.serve.outcome import PERCENTILES, Outcome
from benchmarks.serve.page import fire_section
from benchmarks.serve.refresh import copied
from benchmarks.serve.scheduling import family
from benchmarks.serve.service import CORES, GENERATOR_CORE, Service, served

_WORKERS = 2
_DIFFERENT = 3
_AGAIN_S = 10.0
FULL = {
    **{"rows": shape.ROWS, "deadline_s": shape.DEADLINE_S, "options": []},
    **{"warm_s": 5.0, "stretch": 1.0},
}
# With time enough on a machine that does other things.
QUICK = {
    **{"rows": shape.QUICK_ROWS, "deadline_s": 5.0, "options": ["--no-compile"]},
    **{"warm_s": 0.5, "stretch": 0.02},
}


@dataclass(frozen=True)
class Scenario:
    """Something that happens again and again.

    Attributes:
        title: what.
        front: the service's option.
        every_s: seconds from one time to the next.
        seconds: of the whole run.
        act: makes it happen, and returns seconds until a new worker answered, or None.
    """

    title: str
    front: str
    every_s: float
    seconds: float
    act: "Callable[[Fire, int], float | None]"


def named(root: int, name: str) -> list[int]:
    """Processes of a service whose names, as the kernel shows them, begin so."""
    found = []
    for process in family(root):
        with suppress(OSError):
            if Path(f"/proc/{process}/comm").read_text().startswith(name):
                found.append(process)
    return found


def worker_answers(worker: int, folder: str | None = None, timeout_s: float = 1.0) -> bool:
    """Whether the worker of this number says that it is ready, itself and not through a front.

    Args:
        worker: its number, from 1.
        folder: of the service's temporary files, where it is not the usual one.
        timeout_s: what it may take.
    """
    for path in Path(folder or tempfile.gettempdir()).glob(f"torchrec-bls-*/{worker}[ab].http"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: -\r\n\r\n")
            if connection.recv(100).startswith(b"HTTP/1.1 200 "):
                return True
    return False


class Fire:
    """What may happen to a service.

    Args:
        service: the service.
        sources: checkpoints that take turns.
        directory: folder that it watches.
    """

    def __init__(self, service: Service, sources: list[Path], directory: Path) -> None:
        self._root = service.processes[0]
        self._sources = sources
        self._directory = directory
        self.versions = {sources[0].name: sources[0]}

    def kill_worker(self, number: int) -> float:
        return self._replaced(number, signal.SIGKILL)

    def stop_worker(self, number: int) -> float:
        return self._replaced(number, signal.SIGSTOP)

    def kill_keeper(self, number: int) -> None:
        os.kill(named(self._root, "bls keeper")[0], signal.SIGKILL)

    def kill_front(self, number: int) -> None:
        os.kill(named(self._root, "haproxy")[0], signal.SIGKILL)

    def restart(self, number: int) -> None:
        os.kill(self._root, signal.SIGHUP)

    def refresh(self, number: int) -> None:
        name = f"v{number + 1}"
        source = self._sources[(number + 1) % len(self._sources)]
        copied(source, self._directory / name)
        self.versions[name] = source
        old = self._directory / f"v{number + 1 - _DIFFERENT}"
        if old.exists():
            shutil.rmtree(old)

    def _replaced(self, number: int, how: int) -> float:
        name = f"bls worker {number % _WORKERS + 1}"
        [before] = named(self._root, name)
        began = time.monotonic()
        os.kill(before, how)
        while time.monotonic() < began + _AGAIN_S:
            if named(self._root, name) not in ([], [before]) and worker_answers(
                number % _WORKERS + 1
            ):
                return time.monotonic() - began
            time.sleep(0.005)
        raise RuntimeError(f"{name} was not replaced within {_AGAIN_S:g} s")


SCENARIOS = [
    Scenario("nothing happens", "haproxy", 1e9, 60, lambda fire, number: None),
    Scenario("SIGKILL of a worker", "haproxy", 5, 300, Fire.kill_worker),
    Scenario("SIGKILL of a worker, no front", "none", 5, 300, Fire.kill_worker),
    Scenario("SIGSTOP of a worker", "haproxy", 10, 60, Fire.stop_worker),
    Scenario("SIGKILL of the keeper", "haproxy", 15, 60, Fire.kill_keeper),
    Scenario("SIGKILL of the front", "haproxy", 10, 60, Fire.kill_front),
    Scenario("rolling restart", "haproxy", 30, 120, Fire.restart),
    Scenario("refresh", "haproxy", 10, 300, Fire.refresh),
]


class Repeated(threading.Thread):
    """Makes something happen again and again.

    Args:
        act: makes it happen, told how many times it did before; see `Scenario.act`.
        every_s: seconds from one time to the next.

    Attributes:
        again_s: seconds until a new worker answered, each time.
        times: how many times.
    """

    def __init__(self, act: Callable[[int], float | None], every_s: float) -> None:
        super().__init__(daemon=True)
        self.again_s: list[float] = []
        self.times = 0
        self._act, self._every_s = act, every_s
        self._error: Exception | None = None
        self._end = threading.Event()

    def run(self) -> None:
        os.sched_setaffinity(0, {GENERATOR_CORE})
        begin = time.monotonic()
        try:
            while not self._end.wait(begin + (self.times + 1) * self._every_s - time.monotonic()):
                again_s = self._act(self.times)
                self.times += 1
                if again_s is not None:
                    self.again_s.append(again_s)
        except Exception as error:
            self._error = error

    def end(self) -> None:
        """Ends it, and raises what has ended it before."""
        self._end.set()
        self.join()
        if self._error is not None:
            raise self._error


def measure(
    scenario: Scenario, folder: Path, sources: list[Path], settings: dict[str, Any]
) -> dict[str, Any]:
    """A run of a scenario, and the comparison of its answers."""
    directory = folder / "watched"
    directory.mkdir()
    options = ["--workers", str(_WORKERS), "--front", scenario.front, "--watch", str(directory)]
    build = model.BUILDS[settings["rows"]]["float"]
    stretch = settings["stretch"]
    with (
        served(build, sources[0], *settings["options"], *options, cores=CORES) as service,
        Generator(service.load(settings["rows"], settings["deadline_s"])) as generator,
    ):
        generator.run(settings["rate"], settings["warm_s"])
        fire = Fire(service, sources, directory)
        act = functools.partial(scenario.act, fire)
        repeated = Repeated(act, max(0.5, stretch * scenario.every_s))
        repeated.start()
        outcome = generator.run(
            settings["rate"], max(2.0, stretch * scenario.seconds), seed=1, keep=True
        )
        repeated.end()
    shutil.rmtree(directory)
    return {
        "scenario": scenario.title,
        "front": scenario.front,
        "times": repeated.times,
        "again_s": repeated.again_s,
        **figures(outcome),
        **compared(outcome.kept, fire.versions, settings["rows"]),
    }


def figures(outcome: Outcome) -> dict[str, Any]:
    """What became of the requests of a run, for a record."""
    return {
        "offered": outcome.offered,
        "in_time": outcome.in_time,
        "late": outcome.late,
        "refused": outcome.refused,
        "lost": outcome.failed,
        "answers_ms": {f"p{each:g}": outcome.latency_ms(each, 200) for each in PERCENTILES},
        "lag_p99_ms": outcome.lag_p99_ms,
    }


def main() -> None:
    made = record.parser(__doc__, quick="small tables, some seconds")
    made.add_argument("--rate", type=float, required=True, help="requests a second")
    made.add_argument("scenarios", nargs="*", metavar="WORDS", help="those whose titles have them")
    arguments = made.parse_args()
    settings: dict[str, Any] = {**(QUICK if arguments.quick else FULL), "rate": arguments.rate}
    before = record.environment()
    wanted = [
        each
        for each in SCENARIOS
        if not arguments.scenarios or any(word in each.title for word in arguments.scenarios)
    ]
    with tempfile.TemporaryDirectory(prefix="bls-serve-") as name:
        sources = [Path(name) / f"first-{seed}" for seed in range(_DIFFERENT)]
        for seed, source in enumerate(sources):
            model.write_checkpoint(source, settings["rows"], seed)
        results = [measure(each, Path(name), sources, settings) for each in wanted]
    record.publish(arguments.json, "serving_fire", before, settings, results, fire_section)
    if any(each["wrong"] for each in results):
        raise SystemExit("answers differ from those of the version that they name")


if __name__ == "__main__":
    main()

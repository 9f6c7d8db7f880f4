"""The service and servers that replace their workers, while these die or stand still.

All have two workers and both cores, and get the same requests. A worker that is stopped stays so
until its server replaces it, or the run ends. Lost are requests as `benchmarks.serve.fire` counts
them. A worker counts as one that can answer from when it has its model, and the health endpoint is
polled ten times a second.
"""

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import record
from benchmarks.serve import model, shape
from benchmarks.serve.fire import Repeated, figures
from benchmarks.serve.generator import Generator, Load
from benchmarks.serve.peers.deaths_page import OURS, deaths_section
from benchmarks.serve.peers.running import REPLACING, running
from benchmarks.serve.peers.serving import Batching, Serving
from benchmarks.serve.peers.watch import Live, OwnWorkers, PeerWorkers, Watch, again_s, said
from benchmarks.serve.scheduling import stands_still
from benchmarks.serve.service import CORES, GENERATOR_CORE, free_port, served

_WORKERS = 2
_ALL_READY_S = 120.0
# What waits is taken together, and nothing waits for more. MLServer has no batches of bytes.
_BATCHING = Batching(8, 0)
FULL = {
    **{"rows": shape.ROWS, "deadline_s": shape.DEADLINE_S, "options": []},
    **{"warm_s": 5.0, "stretch": 1.0},
}
# With time enough on a machine that does other things.
QUICK = {
    **{"rows": shape.QUICK_ROWS, "deadline_s": 5.0, "options": ["--no-compile"]},
    **{"warm_s": 0.5, "stretch": 0.3},
}
SERVERS = [*OURS, *REPLACING]


@dataclass(frozen=True)
class Scenario:
    """A signal that a worker gets again and again.

    Attributes:
        title: what happens.
        signal: its number.
        every_s: seconds from one time to the next.
        seconds: of the whole run.
    """

    title: str
    signal: int
    every_s: float
    seconds: float


SCENARIOS = [
    Scenario("SIGKILL of a worker every 5 s", signal.SIGKILL, 5, 60),
    # So seldom that servers which load for seconds are whole again in between.
    Scenario("SIGKILL of a worker every 20 s", signal.SIGKILL, 20, 80),
    Scenario("SIGSTOP of a worker every 10 s", signal.SIGSTOP, 10, 60),
]


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        load: what a generator offers it.
        live: its workers.
        health: URL of its health endpoint.
    """

    load: Load
    live: Live
    health: str


class Deaths:
    """Sends a signal to a worker, each in turn.

    Attributes:
        at_s: when, by `time.monotonic`.
    """

    def __init__(self, live: Live, number: int) -> None:
        self.at_s: list[float] = []
        self._live, self._signal = live, number
        self._hit: list[int] = []

    def left(self) -> set[int]:
        """Workers that live and were not hit: one that was hit needs a moment to die."""
        return self._live() - set(self._hit)

    def __call__(self, number: int) -> None:
        """Hits the worker that has lived longest of those not hit, if one lives at all."""
        live = sorted(self.left())
        if live:
            victim = live[0]
            self._hit.append(victim)
            self.at_s.append(time.monotonic())
            os.kill(victim, self._signal)

    def end(self) -> None:
        """Kills what still stands still."""
        for process in filter(stands_still, self._hit):
            os.kill(process, signal.SIGKILL)


@contextlib.contextmanager
def _serving(name: str, checkpoint: Path, settings: dict[str, Any]) -> Iterator[Server]:
    """Runs the service, or a peer."""
    rows, deadline_s = settings["rows"], settings["deadline_s"]
    with tempfile.TemporaryDirectory(prefix="bls-deaths-") as folder:
        if name in OURS:
            options = ["--workers", str(_WORKERS), "--front", OURS[name].front]
            build, told = model.BUILDS[rows]["float"], {"TMPDIR": folder}
            with served(
                build, checkpoint, *settings["options"], *options, cores=CORES, environment=told
            ) as service:
                live = OwnWorkers(service.processes[0], _WORKERS, folder)
                health = service.url.partition("/v2/")[0] + "/v2/health/ready"
                yield Server(service.load(rows, deadline_s), live, health)
            return
        serving = Serving(
            checkpoint=str(checkpoint),
            rows=rows,
            tables="float",
            port=free_port(),
            batching=_BATCHING,
            deadline_ms=round(1000 * deadline_s),
            queue=None,
            workers=_WORKERS,
            folder=folder,
        )
        peer = REPLACING[name]
        with running(name, serving, CORES) as service:
            load = Load(
                service.url,
                peer.encode,
                rows,
                GENERATOR_CORE,
                deadline_s,
                servers=service.processes,
            )
            health = f"http://127.0.0.1:{serving.port}{peer.health}"
            yield Server(load, PeerWorkers(serving.ready()), health)


def measure(
    name: str, scenario: Scenario, checkpoint: Path, settings: dict[str, Any]
) -> dict[str, Any]:
    """A run of a server in a scenario."""
    stretch, rate = settings["stretch"], settings["rate"]
    with (
        _serving(name, checkpoint, settings) as server,
        Generator(server.load) as generator,
    ):
        _wait_for_all(name, server.live)
        generator.run(rate, settings["warm_s"])
        deaths = Deaths(server.live, scenario.signal)
        repeated = Repeated(deaths, max(1.0, stretch * scenario.every_s))
        watch = Watch(deaths.left, server.health)
        try:
            watch.start()
            repeated.start()
            outcome = generator.run(rate, stretch * scenario.seconds, seed=1)
            repeated.end()
            looks = watch.end()
        finally:
            deaths.end()
    return {
        "scenario": scenario.title,
        "server": name,
        "times": len(deaths.at_s),
        **figures(outcome),
        "again_s": again_s(looks, deaths.at_s, _WORKERS),
        "healthy": said(looks, deaths.at_s, _WORKERS),
    }


def _wait_for_all(name: str, live: Live) -> None:
    end = time.monotonic() + _ALL_READY_S
    while len(live()) < _WORKERS:
        if time.monotonic() > end:
            raise RuntimeError(f"{name} had not {_WORKERS} workers within {_ALL_READY_S:g} s")
        time.sleep(0.1)


def main() -> None:
    made = record.parser(__doc__, quick="small tables, some seconds")
    made.add_argument("--rate", type=float, required=True, help="requests a second")
    made.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(SERVERS)}")
    arguments = made.parse_args()
    unknown = set(arguments.names) - set(SERVERS)
    if unknown:
        made.error(f"no such servers: {', '.join(sorted(unknown))}")
    settings: dict[str, Any] = {**(QUICK if arguments.quick else FULL), "rate": arguments.rate}
    before = record.environment()
    results = []
    with tempfile.TemporaryDirectory(prefix="bls-serve-") as folder:
        checkpoint = Path(folder) / "checkpoint"
        model.write_checkpoint(checkpoint, settings["rows"])
        for scenario in SCENARIOS:
            for name in arguments.names or SERVERS:
                result = measure(name, scenario, checkpoint, settings)
                results.append(result)
                print(f"{name}, {scenario.title}: lost {result['lost']}", flush=True)
    record.publish(arguments.json, "serving_deaths", before, settings, results, deaths_section)


if __name__ == "__main__":
    main()

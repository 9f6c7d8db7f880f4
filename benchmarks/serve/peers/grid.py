"""Looks for the batches that suit each peer: its capacity at each of a few settings, float tables.

A run that was stopped goes on with the next setting, if it gets the same file.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import record
from benchmarks.serve import model, shape
from benchmarks.serve.capacity import Run, is_enough
from benchmarks.serve.generator import Generator, Load
from benchmarks.serve.peers.page import grid_section
from benchmarks.serve.peers.running import PEERS, running
from benchmarks.serve.peers.serving import Batching, Serving
from benchmarks.serve.service import GENERATOR_CORE, free_port

#: The record of the whole grid, from which `chosen` takes each peer's setting.
RECORD = record.RESULTS / "serving_peers_grid.json"
#: Settings of each peer. Waits are whole milliseconds for Mosec, and not 0 for LitServe, whose
#: worker would poll its queue without a pause. BentoML adapts its wait itself, and refuses batches
#: of one.
SETTINGS = {
    "fastapi": [
        *(Batching(requests, 0) for requests in (1, 4, 8, 16, 32)),
        *(Batching(requests, 2) for requests in (8, 16)),
    ],
    "litserve": [
        Batching(1, 0),
        *(Batching(requests, 1) for requests in (4, 8, 16, 32)),
        *(Batching(requests, 3) for requests in (8, 16)),
    ],
    "bentoml": [Batching(requests, None) for requests in (4, 8, 16, 32, 64)],
    "mosec": [
        *(Batching(requests, 1) for requests in (1, 4, 8, 16, 32)),
        *(Batching(requests, 3) for requests in (8, 16)),
    ],
}
FULL = {"rows": shape.ROWS, "first": 300.0, "step_s": 3.0}
QUICK = {"rows": shape.QUICK_ROWS, "first": 50.0, "step_s": 0.5}
# The rate changes by this factor until it has both ends, which then come nearer in so many steps.
_FACTOR, _HALVINGS = 1.5, 3
_WARM_UP_S = 2.0


def warmed(run: Run, first: float) -> None:
    """Lets a server see requests side by side before it is measured, as BentoML needs them."""
    run(first / 4, _WARM_UP_S, 0)


def rough_capacity(run: Run, first: float, step_s: float) -> float:
    """The highest rate found at which almost all requests are answered in time, within 5 %.

    0: not even at a tenth of `first`.
    """

    def suffices(rate: float) -> bool:
        return is_enough(run, rate, step_s, 0)

    low = high = first
    if suffices(first):
        while suffices(high := low * _FACTOR):
            low = high
    else:
        while not suffices(low := high / _FACTOR):
            if low < first / 10:
                return 0.0
            high = low
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if suffices(middle) else (low, middle)
    return low


def measure(name: str, batching: Batching, checkpoint: Path, settings: dict[str, Any]) -> float:
    """Capacity of a peer with a setting."""
    serving = Serving(
        checkpoint=str(checkpoint),
        rows=settings["rows"],
        tables="float",
        port=free_port(),
        batching=batching,
        deadline_ms=round(1000 * shape.DEADLINE_S),
        queue=None,
    )
    with running(name, serving) as service:
        load = Load(service.url, PEERS[name].encode, serving.rows, GENERATOR_CORE)
        with Generator(load) as generator:
            warmed(generator.run, settings["first"])
            return rough_capacity(generator.run, settings["first"], settings["step_s"])


def chosen(grid: record.Record) -> dict[str, tuple[Batching, float]]:
    """The setting of each peer with the highest capacity, and that capacity, requests/s."""
    best: dict[str, tuple[Batching, float]] = {}
    for each in grid["results"]:
        batching = Batching(each["requests"], each["wait_ms"])
        if each["peer"] not in best or each["capacity"] > best[each["peer"]][1]:
            best[each["peer"]] = batching, each["capacity"]
    return best


def alone(grid: record.Record) -> tuple[Batching, float]:
    """FastAPI's setting without batches, and its capacity, requests/s."""
    return next(
        (Batching(each["requests"], each["wait_ms"]), each["capacity"])
        for each in grid["results"]
        if each["peer"] == "fastapi" and each["requests"] == 1
    )


def main() -> None:
    made = record.parser(__doc__, quick="small tables, one setting of each peer, no figures")
    made.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(SETTINGS)}")
    arguments = made.parse_args()
    settings: dict[str, Any] = QUICK if arguments.quick else FULL
    with tempfile.TemporaryDirectory(prefix="bls-serve-") as folder:
        path = arguments.json or Path(folder) / "grid.json"
        empty = {
            "benchmark": "serving_peers_grid",
            "environment": record.environment(),
            "settings": settings,
            "results": [],
        }
        kept = record.Resumable(path, empty, dict)
        done = [(each["peer"], each["requests"], each["wait_ms"]) for each in kept.raw["results"]]
        checkpoint = Path(folder) / "checkpoint"
        model.write_checkpoint(checkpoint, settings["rows"])
        for name in arguments.names or SETTINGS:
            for batching in SETTINGS[name][-1:] if arguments.quick else SETTINGS[name]:
                if (name, batching.requests, batching.wait_ms) in done:
                    continue
                found = measure(name, batching, checkpoint, settings)
                kept.add({"peer": name, **dataclasses.asdict(batching), "capacity": found})
                print(f"{name}, {batching}: {found:.0f} requests/s", flush=True)
        print(grid_section(kept.raw))


if __name__ == "__main__":
    main()

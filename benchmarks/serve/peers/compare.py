"""The service and its peers under the same traffic: capacity, overload, and memory of tables.

One core is the server's with all its processes, the other the generator's. Servers run one after
the other, and a machine may change its speed meanwhile: those that are close to the service have
their turns in several rounds. Needs the record of `benchmarks.serve.peers.grid`. A run that was
stopped goes on with the next server, if it gets the same file.
"""

import contextlib
import functools
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import record
from benchmarks.serve import model, shape
from benchmarks.serve.capacity import Run, capacity, valid
from benchmarks.serve.generator import Encode, Generator, Load, open_inference
from benchmarks.serve.outcome import Outcome
from benchmarks.serve.peers import grid
from benchmarks.serve.peers.page import OURS, section
from benchmarks.serve.peers.running import PEERS, running
from benchmarks.serve.peers.serving import Batching, Serving
from benchmarks.serve.service import GENERATOR_CORE, Service, free_port, served

FULL = {"rows": shape.ROWS, "first": 300.0, "step_s": 4.0, "run_s": 8.0, "rounds": 3}
# Without a search, and with any setting of a peer: it shows that all runs.
QUICK = {"rows": shape.QUICK_ROWS, "first": 50.0, "step_s": 0.0, "run_s": 0.5, "rounds": 2}
#: Shares of the service's capacity at which all are loaded, and of each one's own.
OF_OURS, OF_OWN = (1.5, 3.0), (3.0,)
# Share of the service's capacity in the first round from which on a peer has more rounds.
_CLOSE = 0.6
_DEADLINE_MS = round(1000 * shape.DEADLINE_S)


@contextlib.contextmanager
def _server(
    name: str, tables: str, rows: int, checkpoint: Path, setting: tuple[Batching, float] | None
) -> Iterator[tuple[Service, Encode]]:
    """Runs the service, or a peer with its setting and the capacity that it had with it."""
    if setting is None:
        with served(model.BUILDS[rows][tables], checkpoint) as service:
            yield service, open_inference(service.url)
        return
    batching, found = setting
    # Who has more before him than are answered within the deadline is late. Full batches answer
    # more than the capacity, at which almost all are in time: about twice as many.
    queue = max(1, math.ceil(2 * found * shape.DEADLINE_S))
    serving = Serving(str(checkpoint), rows, tables, free_port(), batching, _DEADLINE_MS, queue)
    with running(name, serving) as service:
        yield service, PEERS[name].encode


def measure(
    server: tuple[Service, Encode], settings: dict[str, Any], first: float, ours: float | None
) -> dict[str, Any]:
    """Capacity of a server, and what it does at shares of that of the service and of its own.

    Args:
        server: which runs.
        settings: rows, and how long to load it.
        first: rate that is tried first, requests/s.
        ours: capacity of the service, requests/s; None: this is the service.
    """
    with _loaded(server, settings["rows"], first) as load:
        result, run = _capacity(load, settings, first)
        rates = [("ours", share, share * (ours or result["capacity"])) for share in OF_OURS]
        if ours is not None:
            rates += [("own", share, share * result["capacity"]) for share in OF_OWN]
        result["overload"] = [
            {"of": of, "share": share, **_figures(run(rate, settings["run_s"], 0))}
            for of, share, rate in rates
        ]
    return {**result, "pss_bytes": _pss_bytes(server[0].processes)}


def measure_again(
    server: tuple[Service, Encode], settings: dict[str, Any], first: float
) -> dict[str, Any]:
    """Capacity of a server in another round, see `measure`."""
    with _loaded(server, settings["rows"], first) as load:
        return _capacity(load, settings, first)[0]


@contextlib.contextmanager
def _loaded(server: tuple[Service, Encode], rows: int, first: float) -> Iterator[Run]:
    service, encode = server
    load = Load(service.url, encode, rows, GENERATOR_CORE, servers=service.processes)
    with Generator(load) as generator:
        grid.warmed(generator.run, min(first, FULL["first"]))
        yield generator.run


def _capacity(run: Run, settings: dict[str, Any], first: float) -> tuple[dict[str, Any], Run]:
    """The capacity, and what loads the server in runs that are not void."""
    if not settings["step_s"]:
        return {"capacity": first}, run
    found = capacity(run, first, settings["step_s"], settings["run_s"])
    figures = [*map(_figures, found.confirmed)]
    return {"capacity": found.rate, "confirmed": figures}, functools.partial(valid, run)


def _figures(outcome: Outcome) -> dict[str, Any]:
    return {name: each for name, each in outcome.figures().items() if name != "histograms"}


def _pss_without_tables(server: tuple[Service, Encode], first: float) -> int:
    """Memory of a server with small tables."""
    service, encode = server
    load = Load(service.url, encode, shape.QUICK_ROWS, GENERATOR_CORE)
    with Generator(load) as generator:
        grid.warmed(generator.run, first)
    return _pss_bytes(service.processes)


def _pss_bytes(processes: list[int]) -> int:
    """Memory of processes; of a page that several share, each has a part."""
    kib = 0
    for process in processes:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
        kib += int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1])
    return 1024 * kib


def _batching(quick: bool) -> dict[str, tuple[Batching, float]]:
    """By peer its setting, and the capacity that it had with it."""
    if quick:
        some = {name: (settings[-1], QUICK["first"]) for name, settings in grid.SETTINGS.items()}
        return {**some, "fastapi_alone": (Batching(1, 0), QUICK["first"])}
    found = record.read(grid.RECORD, "python -m benchmarks.serve.peers.grid")
    return {**grid.chosen(found), "fastapi_alone": grid.alone(found)}


def main() -> None:
    arguments = record.parser(__doc__, quick="small tables, seconds, no figures").parse_args()
    settings: dict[str, Any] = QUICK if arguments.quick else FULL
    batching = _batching(arguments.quick)
    with tempfile.TemporaryDirectory(prefix="bls-serve-") as folder:
        path = arguments.json or Path(folder) / "peers.json"
        empty = {
            "benchmark": "serving_peers",
            "environment": record.environment(),
            "settings": settings,
            "results": [],
        }
        kept = record.Resumable(path, empty, dict)
        small, whole = Path(folder) / "small", Path(folder) / "whole"
        model.write_checkpoint(small, shape.QUICK_ROWS)
        model.write_checkpoint(whole, settings["rows"])
        done = {
            (each["tables"], each["server"], each["round"]): each for each in kept.raw["results"]
        }
        for tables in model.BUILDS[settings["rows"]]:
            ours = None
            for number in range(settings["rounds"]):
                for name in (OURS, *PEERS):
                    before = done.get((tables, name, number - 1))
                    if number and (before is None or before["capacity"] < _CLOSE * (ours or 0)):
                        continue
                    if (tables, name, number) not in done:
                        first = before["capacity"] if before else settings["first"]
                        setting = batching.get(name)
                        with _server(name, tables, settings["rows"], whole, setting) as server:
                            result = (
                                measure_again(server, settings, first)
                                if number
                                else measure(server, settings, first, ours)
                            )
                        if not number:
                            with _server(name, tables, shape.QUICK_ROWS, small, setting) as server:
                                without = _pss_without_tables(server, settings["first"])
                            result["pss_without_tables_bytes"] = without
                        result = {"tables": tables, "server": name, "round": number, **result}
                        done[tables, name, number] = result
                        kept.add(result)
                    ours = ours or done[tables, OURS, 0]["capacity"]
        print(section(kept.raw))


if __name__ == "__main__":
    main()

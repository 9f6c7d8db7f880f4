"""Loads a server on this machine: requests at intended moments, whatever becomes of them.

The generator is a process of its own, on a core of its own. All requests are encoded before a run.
"""

import argparse
import functools
import gc
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.serve import shape
from benchmarks.serve.encoding import encode
from benchmarks.serve.open_loop import GIVE_UP_S, OpenLoop
from benchmarks.serve.outcome import Outcome, outcome_of, table
from benchmarks.serve.scheduling import processor_s, take_core
from benchmarks.serve.traffic import Request, arrivals, requests

CONNECTIONS = 64
#: Different requests, sent in turn: the ids of more tell caches nothing new, and take memory.
REQUESTS = 4096
# Beyond a run: its counting, and the encoding of the requests.
_SLACK_S = 120.0

Encode = Callable[[Request], bytes]


@dataclass(frozen=True)
class Load:
    """What a generator does, run after run.

    Attributes:
        url: of the server, whose host is 127.0.0.1.
        encode: makes a request whole, head and body; picklable.
        rows: rows of each table, from which ids are drawn.
        core: on which the generator runs.
        deadline_s: by which a request has to be answered, from its intended send.
        connections: how many are kept open.
        servers: processes whose CPU time is read.
    """

    url: str
    encode: Encode
    rows: int = shape.ROWS
    core: int = 1
    deadline_s: float = shape.DEADLINE_S
    connections: int = CONNECTIONS
    servers: Sequence[int] = ()

    def address(self) -> tuple[str, int]:
        """Host and port; a ValueError for another host, which nobody may load from here."""
        parts = urlsplit(self.url)
        if parts.hostname not in ("127.0.0.1", "localhost") or parts.port is None:
            raise ValueError(f"{self.url} is not http://127.0.0.1:PORT/...: loads stay here")
        return "127.0.0.1", parts.port


def open_inference(url: str, deadline_s: float = shape.DEADLINE_S) -> Encode:
    """Encodes for the Open Inference Protocol v2 at `url`."""
    return functools.partial(encode, path=urlsplit(url).path, timeout_s=deadline_s)


class Generator:
    """A process that loads a server, run after run, as long as the context lasts."""

    def __init__(self, load: Load) -> None:
        self._load = load
        load.address()

    def __enter__(self) -> "Generator":
        spawn = multiprocessing.get_context("spawn")
        self._connection, there = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(there, self._load), daemon=True)
        self._process.start()
        there.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def run(self, rate: float, seconds: float, seed: int = 0, keep: bool = False) -> Outcome:
        """Sends `rate` requests a second for `seconds`, at moments of a Poisson process.

        The seed is that of the moments. Request i of a run is the one at i % REQUESTS of
        `traffic.requests`. `keep` keeps the answers.

        Raises:
            ConnectionError: nothing listens at the URL.
            RuntimeError: the generator has died, or hangs.
        """
        self._connection.send((rate, seconds, seed, keep))
        try:
            if not self._connection.poll(seconds + GIVE_UP_S + _SLACK_S):
                raise RuntimeError(f"the generator hangs at {rate:g} requests a second")
            result = self._connection.recv()
        except EOFError:
            raise RuntimeError("the generator has died: its output has the reason") from None
        if isinstance(result, Exception):
            raise result
        outcome: Outcome = result
        return outcome


def _serve(connection: Any, load: Load) -> None:
    encoded = [load.encode(request) for request in requests(REQUESTS, load.rows)]
    take_core(load.core)
    gc.freeze()
    while True:
        try:
            rate, seconds, seed, keep = connection.recv()
        except EOFError:
            return
        try:
            connection.send(_run(load, encoded, rate, seconds, seed, keep))
        except ConnectionError as error:
            connection.send(error)


def _run(
    load: Load, encoded: Sequence[bytes], rate: float, seconds: float, seed: int, keep: bool
) -> Outcome:
    due = arrivals(rate, seconds, seed).tolist()
    loop = OpenLoop(load.address(), encoded, due, load.connections, keep)
    gc.collect()
    gc.disable()  # a collection would delay what is due
    used, of_servers = time.process_time(), processor_s(load.servers)
    loop.run()
    spent = time.process_time() - used, processor_s(load.servers) - of_servers
    gc.enable()
    return outcome_of(loop, rate, seconds, load.deadline_s, spent)


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--url", required=True, help="http://127.0.0.1:PORT/v2/models/MODEL/infer")
    made.add_argument("--rate", type=float, required=True, help="requests a second")
    made.add_argument("--seconds", type=float, default=10.0)
    made.add_argument("--deadline-ms", type=float, default=1000 * shape.DEADLINE_S)
    made.add_argument("--rows", type=int, default=shape.ROWS, help="rows of each table")
    made.add_argument("--connections", type=int, default=CONNECTIONS)
    made.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--pids", type=int, nargs="*", default=[], help="of the server, for its CPU")
    made.add_argument("--json", type=Path, help="write the outcome to this file")
    arguments = made.parse_args()
    deadline_s = arguments.deadline_ms / 1000
    load = Load(
        arguments.url,
        open_inference(arguments.url, deadline_s),
        arguments.rows,
        arguments.core,
        deadline_s,
        arguments.connections,
        arguments.pids,
    )
    with Generator(load) as generator:
        outcome = generator.run(arguments.rate, arguments.seconds, arguments.seed)
    print(table(outcome))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(outcome.figures(), indent=1) + "\n")


if __name__ == "__main__":
    main()

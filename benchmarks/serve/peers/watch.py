"""What lives of a server, and what its health endpoint says meanwhile."""

import http.client
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.serve.fire import Repeated, named, worker_answers
from benchmarks.serve.scheduling import runs

#: A worker that can answer: it has its model, and neither died nor stands still.
Live = Callable[[], set[int]]
#: Seconds between two looks.
EVERY_S = 0.1
#: A health endpoint that says nothing for so long does not say "healthy".
HEALTH_S = 1.0
_ANSWER_S = 0.05
# Polls that wait at once.
_POLLS = round(2 * HEALTH_S / EVERY_S)


@dataclass(frozen=True)
class Look:
    """A server at one moment.

    Attributes:
        at_s: the moment, by `time.monotonic`.
        live: workers that could answer.
        healthy: whether the health endpoint, asked at that moment, answered 200.
    """

    at_s: float
    live: int
    healthy: bool


class OwnWorkers:
    """Workers of the service that can answer: each has said so once, itself.

    Args:
        root: the service's first process.
        count: number of workers.
        folder: of the service's temporary files.
    """

    def __init__(self, root: int, count: int, folder: str) -> None:
        self._root, self._count, self._folder = root, count, folder
        self._answered: set[int] = set()

    def __call__(self) -> set[int]:
        for number in range(1, self._count + 1):
            running = {each for each in named(self._root, f"bls worker {number}") if runs(each)}
            # Asked until it answers once: its predecessor has ended, or stands still, and is mute.
            if running - self._answered and worker_answers(number, self._folder, _ANSWER_S):
                self._answered |= running
        return set(filter(runs, self._answered))


class PeerWorkers:
    """Workers of a peer that can answer: each has left a file, see `Serving.ready`."""

    def __init__(self, ready: Path) -> None:
        self._ready = ready

    def __call__(self) -> set[int]:
        return set(filter(runs, (int(path.name) for path in self._ready.iterdir())))


class Watch:
    """Looks at a server again and again.

    Args:
        live: names the workers that live.
        health: URL of its health endpoint.
    """

    def __init__(self, live: Live, health: str) -> None:
        self._live, self._health = live, health
        self._looks: list[tuple[float, int, Future[bool]]] = []
        # Its threads begin in that of the looks, and so on the same core.
        self._pool = ThreadPoolExecutor(_POLLS)
        self._repeated = Repeated(self._look, EVERY_S)

    def start(self) -> None:
        """Begins to look."""
        self._repeated.start()

    def end(self) -> list[Look]:
        """Ends it, and returns what it saw; it raises what has ended it before."""
        try:
            self._repeated.end()
        finally:
            self._pool.shutdown()
        return [Look(at_s, live, said.result()) for at_s, live, said in self._looks]

    def _look(self, number: int) -> None:
        at_s, said = time.monotonic(), self._pool.submit(_healthy, self._health)
        self._looks.append((at_s, len(self._live()), said))


def _healthy(url: str) -> bool:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=HEALTH_S)
    with suppress(OSError, http.client.HTTPException):
        connection.request("GET", parts.path)
        return connection.getresponse().status == 200
    connection.close()
    return False


def again_s(looks: Sequence[Look], deaths: Sequence[float], workers: int) -> list[float | None]:
    """Seconds from each death until all workers could answer; None: not before the next death."""
    found: list[float | None] = []
    for death, following in zip(deaths, [*deaths[1:], float("inf")], strict=True):
        whole = (
            each.at_s - death
            for each in looks
            if death < each.at_s < following and each.live >= workers
        )
        found.append(next(whole, None))
    return found


def said(looks: Sequence[Look], deaths: Sequence[float], workers: int) -> dict[str, Any]:
    """How often the health endpoint was asked, and how often it said "healthy".

    Returns:
        By when: "after" are looks in the second after a death, "fewer" those with fewer workers
        than there should be, and "none" those without any.
    """
    chosen = {
        "after": [e for e in looks if any(0 <= e.at_s - death < 1 for death in deaths)],
        "fewer": [e for e in looks if e.live < workers],
        "none": [e for e in looks if not e.live],
    }
    return {
        name: {"polls": len(some), "healthy": sum(e.healthy for e in some)}
        for name, some in chosen.items()
    }

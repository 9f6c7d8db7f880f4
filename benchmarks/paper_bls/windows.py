"""Exchanges with a window under random delays, or with messages of random sizes."""

from typing import Any

from benchmarks.delays.exchanges import Backend, Channel, Exchange, Words
from benchmarks.delays.runs import measure_windows
from benchmarks.paper_bls.mpi import MpiBackend, starts

_SEED = 11


def measure(stage: str, settings: dict[str, Any], mpi: MpiBackend | None) -> list[dict[str, Any]]:
    """Runs `measure_windows`; one entry for each peer and bound, with the ms per step of the runs.

    "shm" and "c10d" are channels of these transports, read in place; the others are backends.
    """

    def make(words: Words, bound: int) -> dict[str, Exchange]:
        channels = {name: Channel(words, bound, name) for name in ("shm", "c10d")}
        return {**channels, **over_backends(words, bound, mpi)}

    return [
        {
            "peer": name,
            "bound": bound,
            "computed_ideal_ms": ideal,
            "ms_per_step": [elapsed for elapsed, _ in runs],
        }
        for bound, ideal, times in measure_windows(settings, _SEED, make, stage)
        for name, runs in times.items()
    ]


def over_backends(words: Words, bound: int, mpi: MpiBackend | None) -> dict[str, Exchange]:
    """Asynchronous all-to-alls of each backend, which copy into the caller's memory."""
    backends = starts(bound, 8 * int(words.max()), mpi)
    return {name: Backend(words, bound, start) for name, start in backends.items()}

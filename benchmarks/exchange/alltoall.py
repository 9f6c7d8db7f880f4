"""All-to-all-v on one host: our channel against Open MPI, gloo and the raw limit, in one run."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.exchange import native
from benchmarks.exchange.page import section
from benchmarks.exchange.timing import Timing
from benchmarks.harness import record
from benchmarks.harness.launch import on_ranks
from benchmarks.harness.statistics import Spread

KIB = 1024
MODES = ("one_shot", "train")
FULL = {"ranks": [2, 4, 8], "sizes": [8, 4 * KIB, 32 * KIB, 256 * KIB, 4096 * KIB]}
FULL |= {"turns": 3, "seconds": 0.25}
QUICK = {"ranks": [2, 4], "sizes": [8, 32 * KIB, 1024 * KIB], "turns": 2, "seconds": 0.1}
PEERS = ("raw", "channel", "open_mpi", "channel_python", "gloo")


def measure(settings: dict[str, Any], peers: Sequence[str] = PEERS) -> list[dict[str, Any]]:
    """Runs all cells; returns one entry per mode, number of ranks and size."""
    entries = []
    for ranks in settings["ranks"]:
        entries += on_ranks(ranks, measure_on_rank, ranks, settings, peers)
    return sorted(entries, key=lambda entry: MODES.index(entry["mode"]))


def measure_on_rank(
    rank: int, ranks: int, settings: dict[str, Any], peers: Sequence[str]
) -> list[dict[str, Any]]:
    """Measures all peers at all sizes in turns; one entry per mode and size.

    Microseconds per call are over the turns: each turn counts with its median.

    Args:
        rank: this one.
        ranks: how many.
        settings: `sizes` in bytes per ordered pair of ranks; `turns`; `seconds` aimed at for each
            measurement.
        peers: whom.
    """
    timing = Timing(rank, ranks)
    cells = [_Cell(timing, size, settings["seconds"], peers) for size in settings["sizes"]]
    total = settings["turns"] * len(cells)
    with tqdm(total=total, disable=rank != 0, desc=f"{ranks} ranks", unit="turn") as progress:
        for _ in range(settings["turns"]):
            for cell in cells:
                cell.turn()
                progress.update()
    return [
        {"mode": mode, "ranks": ranks, "bytes_per_pair": cell.size, "peers": cell.results(mode)}
        for mode in MODES
        for cell in cells
    ]


class _Cell:
    """All peers at one size per pair."""

    def __init__(self, timing: Timing, size: int, seconds: float, peers: Sequence[str]) -> None:
        self.size = size
        self._timing = timing
        self._seconds = seconds
        self._variants = [
            (peer, setting)
            for peer in peers
            for setting in (timing.mpi if peer == "open_mpi" else [""])
        ]
        self._turns: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)

    def turn(self) -> None:
        """Measures every peer once. Only Open MPI's best settings are kept after the first turn."""
        for peer, setting in self._variants:
            us = self._timing.measure(peer, self.size, self._seconds, setting)
            self._turns[peer, setting].append(us)
        best = {variant for mode in MODES for variant in self._best(mode)}
        self._variants = [variant for variant in self._variants if variant in best]

    def results(self, mode: str) -> dict[str, Any]:
        """Microseconds per call by peer, and Open MPI's setting."""
        peers = {}
        for peer, setting in self._best(mode):
            us = Spread([turn[mode] for turn in self._turns[peer, setting]])
            peers[peer] = {"us_per_call": us} | ({"setting": setting} if setting else {})
        return peers

    def _best(self, mode: str) -> list[tuple[str, str]]:
        """Each peer with its fastest setting."""

        def median(variant: tuple[str, str]) -> float:
            return float(np.median([turn[mode] for turn in self._turns[variant]]))

        fastest: dict[str, tuple[str, str]] = {}
        for variant in sorted(self._variants, key=median, reverse=True):
            fastest[variant[0]] = variant
        return list(fastest.values())


def main() -> None:
    """Runs the benchmark as the command line asks."""
    arguments = record.parser(__doc__, quick="fewer ranks, sizes and turns").parse_args()
    before = record.environment()
    native.build()
    settings = {**(QUICK if arguments.quick else FULL), "mpi": native.mpi_version()}
    if settings["mpi"] is None:
        print("no MPI found: Open MPI is left out (Debian: apt install libopenmpi-dev)")
    record.publish(arguments.json, "alltoall", before, settings, measure(settings), section)


if __name__ == "__main__":
    main()

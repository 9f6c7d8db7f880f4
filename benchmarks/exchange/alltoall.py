"""All-to-all-v on one host: our channel against Open MPI, gloo and the raw limit, in one run."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.exchange import native
from benchmarks.exchange.page import section
from benchmarks.exchange.python_ranks import Ranks
from benchmarks.harness import record
from benchmarks.harness.statistics import Spread

KIB = 1024
MODES = ("one_shot", "train")
FULL = {"ranks": [2, 4, 8], "sizes": [8, 4 * KIB, 32 * KIB, 256 * KIB, 4096 * KIB]}
FULL |= {"turns": 3, "seconds": 0.25}
QUICK = {"ranks": [2, 4], "sizes": [8, 32 * KIB, 1024 * KIB], "turns": 2, "seconds": 0.1}
PEERS = ("raw", "channel", "open_mpi", "channel_python", "gloo")
_FORKED = {"raw": "raw_alltoall", "channel": "channel_alltoall"}


class Cell:
    """All peers at one number of ranks and one size per pair, measured in turns."""

    def __init__(self, ranks: int, size: int, seconds: float, peers: Sequence[str] = PEERS) -> None:
        """`size` in bytes per ordered pair of ranks, `seconds` aimed at per measurement."""
        self.ranks = ranks
        self.size = size
        self._seconds = seconds
        self._measured: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._names = peers
        mpi = "open_mpi" in peers and native.mpi_version()
        self._mpi = native.mpi_settings(ranks) if mpi else {}

    def turn(self, pool: Ranks, progress: "tqdm[Any]") -> None:
        """Measures every peer once. Only Open MPI's best settings are kept after the first turn."""
        for name, run in self._peers(pool):
            progress.set_postfix_str(f"{self.ranks} ranks, {self.size} B, {name}")
            self._measured[name].append(run())
        progress.update()
        best = {self._best_setting(mode) for mode in MODES} if self._mpi else set()
        self._mpi = {name: arguments for name, arguments in self._mpi.items() if name in best}

    def results(self, mode: str) -> dict[str, Any]:
        """Microseconds per call by peer, over the turns: each turn counts with its median."""
        names = {name: name for name in self._measured if not name.startswith("open_mpi")}
        if self._mpi:
            names["open_mpi"] = f"open_mpi: {self._best_setting(mode)}"
        peers: dict[str, Any] = {
            peer: {"us_per_call": Spread(self._medians(name, mode))} for peer, name in names.items()
        }
        if self._mpi:
            peers["open_mpi"]["setting"] = self._best_setting(mode)
        return {"mode": mode, "ranks": self.ranks, "bytes_per_pair": self.size, "peers": peers}

    def _peers(self, pool: Ranks) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        native_cell = (self.ranks, self.size, *native.for_seconds(self._seconds))
        for peer in self._names:
            if peer in _FORKED:
                yield peer, partial(native.run_forked, _FORKED[peer], *native_cell)
            elif peer == "open_mpi":
                for setting, arguments in self._mpi.items():
                    yield f"open_mpi: {setting}", partial(native.run_mpi, arguments, *native_cell)
            else:
                yield peer, partial(pool.measure, peer, self.size, self._seconds)

    def _medians(self, name: str, mode: str) -> list[float]:
        return [turn[mode]["median_us"] for turn in self._measured[name]]

    def _best_setting(self, mode: str) -> str:
        return min(self._mpi, key=lambda name: np.median(self._medians(f"open_mpi: {name}", mode)))


def measure(settings: dict[str, Any], peers: Sequence[str] = PEERS) -> list[dict[str, Any]]:
    """Runs all cells; returns one entry per mode, number of ranks and size."""
    cells = []
    turns = len(settings["ranks"]) * len(settings["sizes"]) * settings["turns"]
    with tqdm(total=turns, unit="turn", desc="alltoall") as progress:
        for ranks in settings["ranks"]:
            group = [Cell(ranks, size, settings["seconds"], peers) for size in settings["sizes"]]
            progress.set_postfix_str(f"starting {ranks} Python ranks")
            with Ranks(ranks) as pool:
                for _ in range(settings["turns"]):
                    for cell in group:
                        cell.turn(pool, progress)
            cells += group
    return [cell.results(mode) for mode in MODES for cell in cells]


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

"""All-to-all-v on one host: our channel against Open MPI, gloo and the raw limit, in one run.

See README.md in this folder for what is compared and how.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import alltoall_native as native
import alltoall_report as report
from alltoall_python import Ranks
from common import environment, spread, write_json
from tqdm import tqdm

KIB = 1024
MODES = ("one_shot", "train")
FULL = {"ranks": [2, 4, 8], "sizes": [8, 4 * KIB, 32 * KIB, 256 * KIB, 4096 * KIB]}
QUICK = {"ranks": [2, 4], "sizes": [8, 32 * KIB, 1024 * KIB]}
PEERS = ("raw", "channel", "open_mpi", "channel_python", "gloo")
_FORKED = {"raw": "raw_alltoall", "channel": "channel_alltoall"}

Run = Callable[[], dict[str, Any]]


class Cell:
    """All peers at one number of ranks and one size per pair, measured in turns."""

    def __init__(
        self, ranks: int, size: int, seconds: float, touch: bool, peers: Sequence[str] = PEERS
    ) -> None:
        """`size` in bytes per ordered pair of ranks, `seconds` aimed at per measurement."""
        self.ranks = ranks
        self.size = size
        self._seconds = seconds
        self._touch = touch
        self._measured: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._names = peers
        self._mpi = native.mpi_settings(ranks) if native.mpi_version() else {}

    def turn(self, pool: Ranks, progress: tqdm[Any]) -> None:
        """Measures every peer once. Only Open MPI's best settings are kept after the first turn."""
        for name, run in self._peers(pool):
            progress.set_postfix_str(f"{self.ranks} ranks, {self.size} B, {name}")
            self._measured[name].append(run())
        best = {self._best_setting(mode) for mode in MODES} if self._mpi else set()
        self._mpi = {name: arguments for name, arguments in self._mpi.items() if name in best}

    def results(self, mode: str) -> dict[str, Any]:
        """Microseconds per call by peer, over the turns: each turn counts with its median."""
        peers: dict[str, Any] = {}
        for name, turns in self._measured.items():
            if not name.startswith("open_mpi"):
                peers[name] = self._summary(turns, mode)
        if self._mpi:
            setting = self._best_setting(mode)
            peers["open_mpi"] = self._summary(self._measured[f"open_mpi: {setting}"], mode)
            peers["open_mpi"]["setting"] = setting
        return {"mode": mode, "ranks": self.ranks, "bytes_per_pair": self.size, "peers": peers}

    def _peers(self, pool: Ranks) -> Iterator[tuple[str, Run]]:
        cell = (self.ranks, self.size, self._seconds, self._touch)
        for peer in self._names:
            if peer in _FORKED:
                yield peer, partial(native.run_forked, _FORKED[peer], *cell)
            elif peer == "open_mpi":
                for setting, arguments in self._mpi.items():
                    yield f"open_mpi: {setting}", partial(native.run_mpi, arguments, *cell)
            else:
                yield peer, partial(pool.measure, peer, *cell[1:])

    def _best_setting(self, mode: str) -> str:
        return min(
            self._mpi,
            key=lambda setting: spread(
                [turn[mode]["median_us"] for turn in self._measured[f"open_mpi: {setting}"]]
            )["median"],
        )

    @staticmethod
    def _summary(turns: list[dict[str, Any]], mode: str) -> dict[str, Any]:
        return {
            "us_per_call": spread([turn[mode]["median_us"] for turn in turns]),
            "turns": [turn[mode] for turn in turns],
        }


def measure(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs all cells; returns one entry per mode, number of ranks and size."""
    cells = []
    turns = len(settings["ranks"]) * len(settings["sizes"]) * settings["turns"]
    with tqdm(total=turns, unit="turn", desc="alltoall") as progress:
        for ranks in settings["ranks"]:
            group = [
                Cell(ranks, size, settings["seconds"], settings["touch"])
                for size in settings["sizes"]
            ]
            progress.set_postfix_str(f"starting {ranks} Python ranks")
            with Ranks(ranks) as pool:
                for _ in range(settings["turns"]):
                    for cell in group:
                        cell.turn(pool, progress)
                        progress.update()
            cells += group
    return [cell.results(mode) for mode in MODES for cell in cells]


def main() -> None:
    """Runs the benchmark as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the whole record to this file")
    parser.add_argument("--plot", type=Path, help="write the figure (PNG) to this file")
    parser.add_argument("--quick", action="store_true", help="fewer ranks, sizes and turns")
    parser.add_argument("--touch", action="store_true", help="receivers sum every byte they get")
    arguments = parser.parse_args()

    settings: dict[str, Any] = {
        **(QUICK if arguments.quick else FULL),
        "turns": 2 if arguments.quick else 3,
        "seconds": 0.1 if arguments.quick else 0.25,
        "touch": arguments.touch,
    }
    before = environment()
    print("building the native programs", flush=True)
    native.build()
    settings["mpi"] = native.mpi_version()
    if settings["mpi"] is None:
        print("no MPI found: Open MPI is left out (Debian: apt install libopenmpi-dev)")
    results = measure(settings)
    print(report.table(before, settings, results))
    if arguments.json:
        write_json(arguments.json, "alltoall", before, settings, results)
    if arguments.plot:
        report.plot(arguments.plot, before, results)


if __name__ == "__main__":
    main()

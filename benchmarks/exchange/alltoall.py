"""All-to-all-v on one host: our channel against Open MPI, gloo and the raw limit, in one run."""

from collections.abc import Sequence
from itertools import product
from typing import Any

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
QUICK = {"ranks": [2], "sizes": [8, 1024 * KIB], "turns": 2, "seconds": 0.1}
PEERS = ("raw", "channel", "open_mpi", "channel_python", "gloo")
#: Both in C++ and in Python: ours, and what it is compared with.
PAPER_PEERS = ("channel", "open_mpi", "bls", "gloo")
_MPI_SETTING = "cma, yield"

#: By peer and setting of Open MPI, of each turn the µs a call by mode.
Turns = dict[tuple[str, str], list[dict[str, float]]]


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

    `settings` have the `sizes` in bytes per ordered pair of ranks, the `turns`, of which each
    counts with its median, and the `seconds` aimed at for each measurement.
    """
    timing = Timing(rank, ranks)
    settings_of = {"open_mpi": list(timing.mpi)}
    variants = [(peer, setting) for peer in peers for setting in settings_of.get(peer, [""])]
    cells: dict[int, Turns] = {size: {v: [] for v in variants} for size in settings["sizes"]}
    turns = list(product(range(settings["turns"]), cells))
    for turn, size in tqdm(turns, disable=rank != 0, desc=f"{ranks} ranks", unit="turn"):
        for (peer, setting), us in cells[size].items():
            us.append(timing.measure(peer, size, setting, seconds=settings["seconds"]))
        if turn == 0:  # only the best settings of Open MPI go on
            fastest = [_fastest(cells[size], mode) for mode in MODES]
            best = {(name, p.get("setting", "")) for peers in fastest for name, p in peers.items()}
            cells[size] = {variant: cells[size][variant] for variant in variants if variant in best}
    return [
        {"mode": mode, "ranks": ranks, "bytes_per_pair": size, "peers": _fastest(of_cell, mode)}
        for mode in MODES
        for size, of_cell in cells.items()
    ]


def _fastest(turns: Turns, mode: str) -> dict[str, Any]:
    """Microseconds per call by peer, and Open MPI's setting."""
    peers: dict[str, Any] = {}
    for (peer, setting), us in turns.items():
        spread = Spread([turn[mode] for turn in us])
        if peer not in peers or spread["median"] < peers[peer]["us_per_call"]["median"]:
            peers[peer] = {"us_per_call": spread} | ({"setting": setting} if setting else {})
    return peers


def measure_sizes(rank: int, ranks: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Fig. 6a of the BLS paper: single calls; one entry a size, with the µs of each run by peer."""
    of_cells = {**settings, "turns": settings["runs"]}
    return [
        {
            "bytes": cell["bytes_per_pair"],
            "us": {name: each["us_per_call"].values_in_order for name, each in peers.items()},
            "mpi_setting": peers.get("open_mpi", {}).get("setting"),
        }
        for cell in measure_on_rank(rank, ranks, of_cells, PAPER_PEERS)
        if cell["mode"] == "one_shot" and (peers := cell["peers"])
    ]


def measure_repetitions(rank: int, ranks: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Fig. 6b: trains of calls; one entry a length, with the seconds of each run by peer.

    A peer is left out from the length on that would take longer than `longest` seconds.
    """
    timing = Timing(rank, ranks)
    names = [name for name in PAPER_PEERS if name != "open_mpi" or timing.mpi]
    seconds: dict[int, dict[str, list[float]]] = {
        length: {name: [] for name in names} for length in settings["lengths"]
    }
    for _ in tqdm(range(settings["runs"]), disable=rank != 0, desc=f"{ranks} ranks", unit="run"):
        per_call = dict.fromkeys(names, 0.0)
        for length, of_length in seconds.items():
            for name in names:
                if length * per_call[name] <= settings["longest"]:
                    us = timing.measure(name, settings["bytes"], _MPI_SETTING, calls=length)
                    per_call[name] = 1e-6 * us["train"]
                    of_length[name].append(length * per_call[name])
    return [
        {
            "repetitions": length,
            # Short of a run where one was slower than another and longer ones were left out.
            "seconds": {n: runs for n, runs in peers.items() if len(runs) == settings["runs"]},
        }
        for length, peers in seconds.items()
    ]


def main() -> None:
    arguments = record.parser(__doc__, quick="fewer ranks, sizes and turns").parse_args()
    before = record.environment()
    native.build()
    settings = {**(QUICK if arguments.quick else FULL), "mpi": native.mpi_version()}
    if settings["mpi"] is None:
        print("no MPI found: Open MPI is left out (Debian: apt install libopenmpi-dev)")
    record.publish(arguments.json, "alltoall", before, settings, measure(settings), section)


if __name__ == "__main__":
    main()

"""The all-to-all alone: Fig. 6a and 6b of the BLS paper. Each function runs on every rank."""

from typing import Any

from tqdm import tqdm

from benchmarks.exchange.alltoall import measure_on_rank
from benchmarks.exchange.timing import Timing

#: Both in C++ and in Python: ours, and what it is compared with.
PEERS = ("channel", "open_mpi", "bls", "gloo")
_MPI_SETTING = "cma, yield"


def measure_sizes(rank: int, ranks: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Single calls by message size; one entry a size, with the µs of each run by peer."""
    of_cells = {**settings, "turns": settings["runs"]}
    return [
        {
            "bytes": cell["bytes_per_pair"],
            "us": {name: each["us_per_call"].values_in_order for name, each in peers.items()},
            "mpi_setting": peers.get("open_mpi", {}).get("setting"),
        }
        for cell in measure_on_rank(rank, ranks, of_cells, PEERS)
        if cell["mode"] == "one_shot" and (peers := cell["peers"])
    ]


def measure_repetitions(rank: int, ranks: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Trains of calls by their length; one entry a length, with the seconds of each run by peer.

    A peer is left out from the length on that would take longer than `longest` seconds.
    """
    timing = Timing(rank, ranks)
    names = [name for name in PEERS if name != "open_mpi" or timing.mpi]
    seconds: dict[int, dict[str, list[float]]] = {
        length: {name: [] for name in names} for length in settings["lengths"]
    }
    for _ in tqdm(range(settings["runs"]), disable=rank != 0, desc=f"{ranks} ranks", unit="run"):
        per_call = dict.fromkeys(names, 0.0)
        for length, of_length in seconds.items():
            for name in names:
                if length * per_call[name] <= settings["longest"]:
                    us = timing.repeat(name, settings["bytes"], length, _MPI_SETTING)
                    per_call[name] = 1e-6 * us
                    of_length[name].append(length * per_call[name])
    return [
        {
            "repetitions": length,
            # Short of a run where one was slower than another and longer ones were left out.
            "seconds": {n: runs for n, runs in peers.items() if len(runs) == settings["runs"]},
        }
        for length, peers in seconds.items()
    ]

"""The all-to-all alone: Fig. 6a and 6b of the BLS paper."""

from collections.abc import Callable
from functools import partial
from typing import Any

from tqdm import tqdm

from benchmarks.exchange import native
from benchmarks.exchange.alltoall import Cell
from benchmarks.exchange.python_ranks import Ranks

#: Both in C++ and in Python: ours, and what it is compared with.
PEERS = ("channel", "open_mpi", "bls", "gloo")
_MPI_SETTING = "cma, yield"


def measure_sizes(ranks: int, settings: dict[str, Any], pool: Ranks) -> list[dict[str, Any]]:
    """Single calls by message size; one entry a size, with the µs of each run by peer."""
    cells = [Cell(ranks, size, settings["seconds"], PEERS) for size in settings["sizes"]]
    with tqdm(total=len(cells) * settings["runs"], desc=f"fig6a-{ranks}", unit="cell") as bar:
        for _ in range(settings["runs"]):
            for cell in cells:
                cell.turn(pool, bar)
    results = []
    for cell in cells:
        peers = cell.results("one_shot")["peers"]
        us = {name: peer["us_per_call"].values_in_order for name, peer in peers.items()}
        setting = peers.get("open_mpi", {}).get("setting")
        results.append({"bytes": cell.size, "us": us, "mpi_setting": setting})
    return results


def measure_repetitions(ranks: int, settings: dict[str, Any], pool: Ranks) -> list[dict[str, Any]]:
    """Trains of calls by their length; one entry a length, with the seconds of each run by peer.

    A peer is left out from the length on that would take longer than `longest` seconds.
    """
    lengths, size = settings["lengths"], settings["bytes"]

    def train(run: Callable[..., dict[str, Any]], which: Any, calls: int) -> float:
        measured = run(which, ranks, size, *native.repeated(calls))
        return float(measured["train"]["median_us"])

    repeat: dict[str, Callable[[int], float]] = {
        "channel": partial(train, native.run_forked, "channel_alltoall"),
        "bls": partial(pool.repeat, "bls", size),
        "gloo": partial(pool.repeat, "gloo", size),
    }
    if native.mpi_version():
        setting = native.mpi_settings(ranks)[_MPI_SETTING]
        repeat["open_mpi"] = partial(train, native.run_mpi, setting)
    seconds: list[dict[str, list[float]]] = [{name: [] for name in repeat} for _ in lengths]
    with tqdm(total=settings["runs"] * len(lengths), desc=f"fig6b-{ranks}", unit="length") as bar:
        for _ in range(settings["runs"]):
            per_call = dict.fromkeys(repeat, 0.0)
            for length, of_length in zip(lengths, seconds, strict=True):
                for name, run in repeat.items():
                    if length * per_call[name] <= settings["longest"]:
                        per_call[name] = 1e-6 * run(length)
                        of_length[name].append(length * per_call[name])
                bar.update()
    return [
        {
            "repetitions": length,
            # Short of a run where one was slower than another and longer ones were left out.
            "seconds": {n: runs for n, runs in peers.items() if len(runs) == settings["runs"]},
        }
        for length, peers in zip(lengths, seconds, strict=True)
    ]

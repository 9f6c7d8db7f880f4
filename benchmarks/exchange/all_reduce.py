"""All-reduce of float32 sums on one host: backends bls and gloo against Open MPI, in one run."""

import json
import os
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.exchange import native
from benchmarks.harness import page, record
from benchmarks.harness.launch import gathered, on_ranks, pin_to_core, slowest_ms
from benchmarks.harness.statistics import Spread, ratio_of_medians

KIB = 1024
FULL: dict[str, Any] = {"ranks": [2, 4], "turns": 9}
FULL |= {"sizes": [8, 4 * KIB, 64 * KIB, 1024 * KIB, 4096 * KIB, 32768 * KIB]}
QUICK: dict[str, Any] = {"ranks": [2], "turns": 2, "sizes": [8, 1024 * KIB]}
PEERS = {"bls": "bls", "gloo": "gloo", "open_mpi": "Open MPI"}
_MPI_LIMIT_S = 120


def calls(size: int) -> int:
    """Back to back in a sample."""
    return int(np.clip(2**22 / size, 2, 100))


def measure_on_rank(rank: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry a size: the µs a call of each peer at its best setting for that size."""
    cores, sizes = os.sched_getaffinity(0), settings["sizes"]
    torch.set_num_threads(1)
    groups = {}
    for pinned, backend in product((False, True), ("bls", "gloo")):
        if pinned:
            pin_to_core(rank)  # before the group's own threads are made
        groups[backend, "pinned" if pinned else "free"] = group = dist.new_group(backend=backend)
        _check(group)
    mpi = native.mpi_settings(dist.get_world_size()) if settings["mpi"] else {}
    us: dict[int, dict[tuple[str, str], list[float]]] = {size: {} for size in sizes}
    for turn in tqdm(range(settings["turns"]), disable=rank != 0, unit="turn"):
        for (backend, how), group in groups.items():
            if how == "pinned":
                pin_to_core(rank)
            for size in sizes:
                reduce = partial(dist.all_reduce, torch.zeros(size // 4), group=group)
                slowest_ms(reduce)
                sample = 1e3 * slowest_ms(reduce, calls(size))
                us[size].setdefault((backend, how), []).append(sample)
            os.sched_setaffinity(0, cores)
        for setting, parameters in mpi.items():
            # After the first turn, where it was the fastest.
            wanted = [s for s in sizes if turn == 0 or _best(us[s], "open_mpi")[0] == setting]
            found = _measure_mpi(rank, parameters, wanted) if wanted else []
            for size, sample in zip(wanted, found, strict=True):
                us[size].setdefault(("open_mpi", setting), []).append(sample)
    ranks, names = dist.get_world_size(), [name for name in PEERS if name != "open_mpi" or mpi]
    return [
        {
            "ranks": ranks,
            "bytes": size,
            "peers": {name: _summary(us[size], name) for name in names},
            "over_gloo": ratio_of_medians(*(_best(us[size], name)[1] for name in ("gloo", "bls"))),
        }
        for size in sizes
    ]


def _check(group: Any) -> None:
    ones = torch.ones(100_000)
    dist.all_reduce(ones, group=group)
    assert torch.all(ones == dist.get_world_size())


def _best(samples: dict[tuple[str, str], list[float]], peer: str) -> tuple[str, list[float]]:
    of_peer = {setting: us for (name, setting), us in samples.items() if name == peer}
    return min(of_peer.items(), key=lambda each: float(np.median(each[1])))


def _summary(samples: dict[tuple[str, str], list[float]], peer: str) -> dict[str, Any]:
    setting, us = _best(samples, peer)
    return {"setting": setting, "us_per_call": Spread(us)}


def _measure_mpi(rank: int, parameters: dict[str, str], sizes: list[int]) -> list[float]:
    found: list[float] = []
    if rank == 0:  # all others wait in the kernel
        start = native.mpirun(dist.get_world_size(), _MPI_LIMIT_S, parameters)
        program = [sys.executable, str(Path(__file__).with_name("mpi_all_reduce.py"))]
        for size in sizes:
            program += [str(size), str(calls(size))]
        found = json.loads(native.checked([*start, *program]).splitlines()[-1])
    return gathered(found)[0]


def section(made: record.Record) -> str:
    """All cells, with the ratio to gloo, and those in which a peer was faster."""
    rows, faster = [], []
    for cell in made["results"]:
        medians = {name: peer["us_per_call"]["median"] for name, peer in cell["peers"].items()}
        size = page.size(cell["bytes"])
        times = [f"{medians[name]:,.1f}" if name in medians else "-" for name in PEERS]
        low, ratio, high = cell["over_gloo"]
        rows.append([cell["ranks"], size, *times, f"{ratio:.1f} [{low:.1f}-{high:.1f}]"])
        faster += [
            f"{cell['ranks']} ranks, {size}: {PEERS[name]}"
            for name, us in medians.items()
            if us < medians["bls"]
        ]
    header = ["ranks", "tensor", *PEERS.values(), "times faster than gloo"]
    return page.section(
        made,
        "µs per call, back to back: slowest rank, median over the turns; the ratio of medians has "
        "its 95 % interval by bootstrap.",
        page.table(header, rows),
        faster=faster,
    )


def main() -> None:
    arguments = record.parser(__doc__, quick="2 ranks, two sizes, two turns").parse_args()
    before, settings = record.environment(), dict(QUICK if arguments.quick else FULL)
    settings["mpi"] = native.mpi_for_python()
    results = []
    for ranks in settings["ranks"]:
        results += on_ranks(ranks, measure_on_rank, settings)
    record.publish(arguments.json, "all_reduce", before, settings, results, section)


if __name__ == "__main__":
    main()

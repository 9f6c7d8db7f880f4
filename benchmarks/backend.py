"""`torch.distributed.all_to_all_single` over the backends bls and gloo, in one run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from alltoall_python import Ranks
from common import environment, spread, write_json

FULL = {"ranks": [2, 4, 8], "sizes": [8, 4096, 32 << 10, 256 << 10, 4 << 20], "turns": 3}
QUICK = {"ranks": [2, 4], "sizes": [8, 32 << 10, 4 << 20], "turns": 1}
BACKENDS = ("bls", "gloo")
MODES = ("one_shot", "train")


def measure(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns for each number of ranks, size and mode the turns of both backends."""
    results = []
    for ranks in settings["ranks"]:
        turns: dict[int, list[dict[str, Any]]] = {size: [] for size in settings["sizes"]}
        with Ranks(ranks) as pool:
            for _ in range(settings["turns"]):
                for size in settings["sizes"]:
                    turns[size].append(
                        {b: pool.measure(b, size, settings["seconds"], False) for b in BACKENDS}
                    )
        for size in settings["sizes"]:
            for mode in MODES:
                cell: dict[str, Any] = {"ranks": ranks, "size": size, "mode": mode}
                for backend in BACKENDS:
                    medians = [turn[backend][mode]["median_us"] for turn in turns[size]]
                    cell[backend] = spread(medians)
                results.append(cell)
                print(row(cell), flush=True)
    return results


def row(cell: dict[str, Any]) -> str:
    """One line of the table: µs per call, and how many times faster bls is."""
    bls, gloo = (cell[backend]["median"] for backend in BACKENDS)
    return (
        f"{cell['ranks']:5} {cell['size']:8} {cell['mode']:>9} "
        f"{bls:10.1f} {gloo:10.1f} {gloo / bls:6.1f}"
    )


def main() -> None:
    """Runs the benchmark as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the whole record to this file")
    parser.add_argument("--quick", action="store_true", help="fewer ranks, sizes and turns")
    arguments = parser.parse_args()
    settings = {**(QUICK if arguments.quick else FULL), "seconds": 0.1 if arguments.quick else 0.25}
    before = environment()
    print(f"load {before['load_average']}; µs per call, median of the turns")
    print("ranks    bytes      mode        bls       gloo  times")
    results = measure(settings)
    if arguments.json:
        write_json(arguments.json, "backend", before, settings, results)


if __name__ == "__main__":
    main()

"""The torch.distributed backend bls against gloo, in one run: all-to-all, and TorchRec over it.

See README.md in this folder for what is compared and how.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import backend_torchrec
from alltoall_python import Ranks
from backend_report import table
from common import environment, spread, write_json
from tqdm import tqdm

FULL = {"ranks": [2, 4, 8], "sizes": [8, 4096, 32 << 10, 256 << 10, 4 << 20], "turns": 3}
FULL |= {"seconds": 0.15, "torchrec_ranks": [2, 4], "samples": 9}
QUICK = {"ranks": [2, 4], "sizes": [8, 32 << 10, 4 << 20], "turns": 1}
QUICK |= {"seconds": 0.1, "torchrec_ranks": [2], "samples": 3}
BACKENDS = ("bls", "gloo")
MODES = ("one_shot", "train")


def measure_alltoall(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns for each number of ranks, size and mode the turns of both backends."""
    results = []
    for ranks in settings["ranks"]:
        turns: dict[int, list[dict[str, Any]]] = {size: [] for size in settings["sizes"]}
        with Ranks(ranks) as pool:
            for size in tqdm(settings["sizes"] * settings["turns"], desc=f"{ranks} ranks"):
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
    return results


def main() -> None:
    """Runs the benchmark as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the whole record to this file")
    parser.add_argument("--quick", action="store_true", help="fewer ranks, sizes and turns")
    settings: dict[str, Any] = QUICK if (arguments := parser.parse_args()).quick else FULL
    started_in = environment()
    results: dict[str, Any] = {"alltoall": measure_alltoall(settings)}
    results["torchrec"] = [
        result
        for ranks in tqdm(settings["torchrec_ranks"], desc="TorchRec")
        for result in backend_torchrec.measure(ranks, settings["samples"])
    ]
    if arguments.json:
        write_json(arguments.json, "backend", started_in, settings, results)
    print(table(started_in, results))


if __name__ == "__main__":
    main()

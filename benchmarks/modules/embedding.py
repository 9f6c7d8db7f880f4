"""Sharded embedding modules, forward only: bounded lag at bound 0 against TorchRec on gloo.

Each sample times a few forwards back to back on every rank and counts the slowest; they are timed
in turn. The lookup alone, timed the same way on ids that are already there, is the limit.
"""

import itertools
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.harness import record
from benchmarks.harness.launch import on_ranks
from benchmarks.harness.statistics import Spread
from benchmarks.modules.models import Case, build, forward_ms, ids_of
from benchmarks.modules.page import section

FULL = {"ranks": (2, 4), "batches": (512, 2048), "samples": 15}
QUICK = {"ranks": (2,), "batches": (512,), "samples": 3}
VARIANTS = ("torchrec", "ours", "lookup")


def measure(rank: int, settings: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Runs one rank over all cases."""
    results = []
    kinds = itertools.product(("EC", "EBC"), ("table_wise", "row_wise"), settings["batches"])
    cases = [Case(module, sharding, ranks, batch) for module, sharding, batch in kinds]
    with torch.no_grad():
        for case in tqdm(cases, disable=rank != 0, desc=f"{ranks} ranks"):
            forwards = build(case, ids_of(case, rank))
            for forward in 3 * forwards:
                forward()
            samples = [[forward_ms(each) for each in forwards] for _ in range(settings["samples"])]
            columns = zip(VARIANTS, zip(*samples, strict=True), strict=True)
            results.append({**asdict(case), "ms": {name: Spread(ms) for name, ms in columns}})
    return results


def main() -> None:
    """Measures, prints the table and writes the record."""
    arguments = record.parser(__doc__, quick="few samples, 2 ranks, batch 512").parse_args()
    settings: dict[str, Any] = QUICK if arguments.quick else FULL
    before = record.environment()
    results = [
        result
        for ranks in settings["ranks"]
        for result in on_ranks(ranks, measure, settings, ranks)
    ]
    record.publish(arguments.json, "embedding", before, settings, results, section)


if __name__ == "__main__":
    main()

"""Sharded modules, forward only: bounded lag at bound 0, TorchRec on gloo, the lookup alone."""

import itertools
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.harness import record
from benchmarks.harness.launch import on_ranks
from benchmarks.harness.statistics import in_turns
from benchmarks.modules.models import Case, build, ids_of, samplers
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
            timed = samplers(dict(zip(VARIANTS, forwards, strict=True)))
            results.append({**case._asdict(), "ms": in_turns(timed, settings["samples"])})
    return results


def main() -> None:
    """Measures, prints the table and writes the record."""
    arguments = record.parser(__doc__, quick="few samples, 2 ranks, batch 512").parse_args()
    settings: dict[str, Any] = QUICK if arguments.quick else FULL
    before = record.environment()
    results: list[dict[str, Any]] = []
    for ranks in settings["ranks"]:
        results += on_ranks(ranks, measure, settings, ranks)
    record.publish(arguments.json, "embedding", before, settings, results, section)


if __name__ == "__main__":
    main()

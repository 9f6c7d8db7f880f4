"""Compares forwards of the sharded modules of this working tree with those of another checkout."""

import gc
import itertools
import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import commits
from benchmarks.harness.launch import on_ranks
from benchmarks.modules.embedding import COLD, SHARDINGS
from benchmarks.modules.models import KINDS, Case, Forward, ids_of, samplers, sharded
from torchrec_bls import BLSConfig

_SAMPLES = 9


def _cases(ranks: int) -> list[Case]:
    """Cold rows of both modules by both shardings; sums of longer bags among two ranks."""
    batches = {2: (512, 8), 4: (2048, 64)}[ranks]
    found = []
    for module, sharding in itertools.product(("EC", "EBC"), SHARDINGS):
        ids = (20, 1) if (module, ranks) == ("EBC", 2) else (1,)
        found += [
            Case(module, sharding, ranks, batch, ids=n, rows=COLD) for n in ids for batch in batches
        ]
    return found


def measure(rank: int, cases: list[Case], options: Mapping[str, Any]) -> commits.Turn:
    """Milliseconds of a forward on the slowest rank, the median of some samples.

    Args:
        rank: this process.
        cases: those of one module and sharding one after the other.
        options: of BLSConfig.
    """
    found: commits.Turn = {}
    with torch.no_grad():
        for (kind, sharding), of_model in itertools.groupby(cases, lambda case: case[:2]):
            of_kind = list(of_model)
            ours = sharded(
                of_kind[0], KINDS[kind][3](config=BLSConfig(**options)), dist.group.WORLD, sharding
            )
            for case in of_kind:
                label = f"{kind} {sharding}, {case.ranks} ranks, {case.batch} x {case.ids} ids"
                found[label] = _sampled(ours, case, rank)
            del ours  # before the next one is made; it is part of cycles
            gc.collect()
    return found


def _sampled(ours: Any, case: Case, rank: int) -> float:
    def forward(ids: Any) -> object:
        return ours(ids).wait()

    def prepared(seed: int) -> Forward:
        return partial(forward, ids_of(case, rank, seed))

    sample = samplers({"ours": prepared}, fresh=True)["ours"]
    sample()
    return statistics.median(sample() for _ in range(_SAMPLES))


def _turn() -> commits.Turn:
    found: commits.Turn = {}
    for ranks in (2, 4):
        found |= on_ranks(ranks, measure, _cases(ranks), {})
    return found


if __name__ == "__main__":
    commits.main("modules.commits", _turn, str(__doc__), "ms")

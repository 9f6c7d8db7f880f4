"""Single forwards of small batches, read directly, through DistributedModelParallel."""

import itertools
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

from benchmarks.direct.page import latency_section
from benchmarks.harness import record
from benchmarks.harness.launch import gathered, on_ranks
from benchmarks.modules.models import HOT_ROWS, KINDS, Case, ids_of, placed
from torchrec_bls import BLSConfig

COLD = 50_000
FULL = {"forwards": 1000, "every": 1}
QUICK = {"forwards": 20, "every": 7}
_QUANTILES = (0.5, 0.9, 0.99)


def cases() -> list[Case]:
    return [
        Case(module, sharding, 2, batch, rows=rows)
        for module, sharding in itertools.product(("EC", "EBC"), ("table_wise", "row_wise"))
        for rows in (HOT_ROWS, COLD)
        for batch in (1, 8)
    ]


class _Tables(nn.Module):
    """A model of nothing but tables."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, features: Any) -> Any:
        return self.tables(features)


def sharded_model(case: Case) -> DistributedModelParallel:
    """Returns the tables of a case as a model of their own, read directly."""
    sharder = KINDS[case.module][3](config=BLSConfig(lookup="direct"))
    whole, plan = placed(case, sharder)
    return DistributedModelParallel(
        _Tables(whole),
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": plan}),
        sharders=[sharder],
        init_data_parallel=False,
    )


def measure(rank: int, case: Case, forwards: int) -> dict[str, Any]:
    """Times each forward alone; ranks need not wait for each other, and do not."""
    model = sharded_model(case)
    # Hot: the same ids every time.
    seeds = range(forwards) if case.rows == COLD else [0] * forwards
    batches = [ids_of(case, rank, seed) for seed in seeds]
    ms = []
    with torch.no_grad():
        model(batches[0]).wait()
        dist.barrier()
        for batch in batches:
            begin = time.perf_counter()
            model(batch).wait()
            ms.append((time.perf_counter() - begin) * 1e3)
    of_ranks = gathered(np.quantile(ms, _QUANTILES).tolist())
    median, p90, p99 = np.max(of_ranks, axis=0).tolist()
    unusual = {k: v for k, v in case._asdict().items() if v != case._field_defaults.get(k)}
    return {**unusual, "median": median, "p90": p90, "p99": p99}


def main() -> None:
    arguments = record.parser(__doc__, quick="few forwards and cases").parse_args()
    settings: dict[str, Any] = QUICK if arguments.quick else FULL
    before = record.environment()
    chosen = cases()[:: settings["every"]]
    results = [on_ranks(2, measure, case, settings["forwards"]) for case in chosen]
    record.publish(arguments.json, "direct_latency", before, settings, results, latency_section)


if __name__ == "__main__":
    main()

"""The six sharders of Table III of the performance-modelling paper, and wholly random plans."""

from collections.abc import Callable

import numpy as np
from torchrec_bls.sharding.problem.job import Job
from torchrec_bls.sharding.problem.options import ALL_RANKS, ANY_RANKS, options_of
from torchrec_bls.sharding.problem.tables import (
    TABLE_WISE,
    PlacedShard,
    PlacedTable,
    Table,
    Workload,
)

# E, L and D of the paper are rows, pooling factor and columns.
_COSTS: dict[str, Callable[[Table, float], float]] = {
    "size_greedy": lambda table, pooling: table.rows,
    "lookup_greedy": lambda table, pooling: pooling * table.dim,
    "norm_lookup_greedy": lambda table, pooling: pooling / table.rows,
    "size_lookup_greedy": lambda table, pooling: pooling * table.dim * np.log10(table.rows),
}
TABLE_III = ("naive", "random", *_COSTS)


def table_iii_plan(
    sharder: str, workload: Workload, job: Job, seed: int = 0
) -> tuple[PlacedTable, ...]:
    """Returns the plan of one of `TABLE_III`: whole tables, whatever memory and constraints say.

    Args:
        sharder: its name. The greedy ones give the tables, the costliest first, to the rank with
            the least sum of costs.
        workload: the tables.
        job: the ranks.
        seed: of the random one.

    Raises:
        ValueError: there is no such sharder.
    """
    tables = workload.tables
    if sharder == "naive":
        ranks = [index % job.ranks for index in range(len(tables))]
    elif sharder == "random":
        ranks = np.random.default_rng(seed).integers(job.ranks, size=len(tables)).tolist()
    elif sharder in _COSTS:
        costs = [_COSTS[sharder](t, workload.reuse_of(t).pooling_factor) for t in tables]
        ranks = _greedily(costs, job.ranks)
    else:
        raise ValueError(f"there is no sharder '{sharder}', only {', '.join(TABLE_III)}")
    return tuple(
        PlacedTable(table, TABLE_WISE, (PlacedShard(rank, table.rows, table.dim),))
        for table, rank in zip(tables, ranks, strict=True)
    )


def _greedily(costs: list[float], ranks: int) -> list[int]:
    sums = np.zeros(ranks)
    chosen = [0] * len(costs)
    for table in sorted(range(len(costs)), key=lambda index: -costs[index]):
        chosen[table] = int(sums.argmin())
        sums[chosen[table]] += costs[table]
    return chosen


def random_plan(workload: Workload, job: Job, seed: int) -> tuple[PlacedTable, ...]:
    """Returns a plan with a random option and random ranks for each table, memory aside."""
    random = np.random.default_rng(seed)
    plan = []
    for index, table in enumerate(workload.tables):
        options = options_of(index, table, job)
        if not table.pooled:
            # An EmbeddingCollection has one width of column-wise shards: leave them whole.
            options = [option for option in options if "/" not in option.group]
        option = options[random.integers(len(options))]
        if option.spread == ANY_RANKS:
            ranks = random.permutation(job.ranks)[: option.shards]
        elif option.spread == ALL_RANKS:
            ranks = np.arange(job.ranks)
        else:
            first = random.integers(job.ranks // job.host_ranks) * job.host_ranks
            ranks = np.arange(first, first + job.host_ranks)
        plan.append(option.placed(table, ranks.tolist()))
    return tuple(plan)

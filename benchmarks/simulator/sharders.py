"""The six sharders of Table III of the performance-modelling paper."""

from collections.abc import Callable

import numpy as np
from torchrec_bls.sharding.problem.job import Job
from torchrec_bls.sharding.problem.tables import TABLE_WISE, PlacedShard, PlacedTable, Workload

# E, L and D of the paper are rows, pooling factor and columns.
_COSTS: dict[str, Callable[..., float]] = {
    "size_greedy": lambda table, pooling: table.rows,
    "lookup_greedy": lambda table, pooling: pooling * table.dim,
    "norm_lookup_greedy": lambda table, pooling: pooling / table.rows,
    "size_lookup_greedy": lambda table, pooling: pooling * table.dim * np.log10(table.rows),
}
TABLE_III = ("naive", "random", *_COSTS)


def table_iii_plan(
    sharder: str, workload: Workload, job: Job, seed: int = 0
) -> tuple[PlacedTable, ...]:
    """The plan of one of `TABLE_III`: whole tables, whatever memory and constraints say.

    The greedy ones give tables, the costliest first, to the rank with the least sum of costs.
    """
    tables = workload.tables
    ranks = np.arange(len(tables)) % job.ranks
    if sharder == "random":
        ranks = np.random.default_rng(seed).integers(job.ranks, size=len(tables))
    elif sharder in _COSTS:
        of_table = _COSTS[sharder]
        costs = np.array([of_table(t, workload.reuse_of(t).pooling_factor) for t in tables])
        sums = np.zeros(job.ranks)
        for table in np.argsort(-costs, kind="stable"):
            ranks[table] = sums.argmin()
            sums[ranks[table]] += costs[table]
    elif sharder != "naive":
        raise ValueError(f"there is no sharder '{sharder}', only {', '.join(TABLE_III)}")
    return tuple(
        PlacedTable(table, TABLE_WISE, (PlacedShard(rank, table.rows, table.dim),))
        for table, rank in zip(tables, ranks.tolist(), strict=True)
    )

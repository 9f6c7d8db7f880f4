"""The tables of a plan that share exchanges, with each rank's lookups and bytes for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..cost_interface import LookupWork
from .collectives import way_of
from .job import Job
from .shard_traffic import (
    EMBEDDING_BYTES,
    ShardTraffic,
    read_by_exchange,
    result_bytes,
    shard_traffic,
    slots_bytes,
)
from .tables import PlacedTable, Workload

Floats = npt.NDArray[np.float64]


class PlanGroup:
    """The tables of a module that are sharded in the same way.

    Args:
        module: path of the module.
        sharding_type: sharding type of the tables.
        pooled: whether the tables are an EmbeddingBagCollection's.
        job: job that the plan is for.

    Attributes:
        module: path of the module.
        sharding_type: sharding type of the tables.
        way: exchange of their embeddings.
        job: job that the plan is for.
        works: lookups of one op, by rank, then by bytes of a weight.
        ids: (ranks,), bytes of ids and lengths for each rank, from each rank.
        rows: (ranks,), bytes of embeddings by each rank, for each rank.
        results: (ranks,), number of these embeddings.
        held: (ranks,), bytes that each rank holds (ShardTraffic.held_bytes).
        features: number of features of the tables.
    """

    def __init__(self, module: str, sharding_type: str, pooled: bool, job: Job) -> None:
        self.module = module
        self.sharding_type = sharding_type
        self.way = way_of(job, sharding_type, pooled)
        self.job = job
        self.works: list[dict[int, list[LookupWork]]] = [{} for _ in range(job.ranks)]
        self.ids = np.zeros(job.ranks)
        self.rows = np.zeros(job.ranks)
        self.results = np.zeros(job.ranks)
        self.held = np.zeros(job.ranks)
        self.features = 0

    def add(self, rank: int, traffic: ShardTraffic) -> None:
        """Adds a shard that `rank` has."""
        work = traffic.lookup
        self.works[rank].setdefault(work.weight_bytes, []).append(work)
        self.ids[rank] += traffic.ids_per_rank
        self.rows[rank] += traffic.rows_per_rank
        self.results[rank] += traffic.rows_per_rank / (work.dim * EMBEDDING_BYTES)
        self.held[rank] += traffic.held_bytes

    @property
    def read_by_exchange(self) -> bool:
        """Returns whether the exchange reads the tables (LookupWork.by_exchange)."""
        works = [work for ops in self.works for of_op in ops.values() for work in of_op]
        return bool(works) and all(work.by_exchange for work in works)

    def slots(self, encoded: Floats | None = None) -> int:
        """Returns the bytes of the slots of the group's channels on each rank.

        Args:
            encoded: (ranks,), bytes of embeddings as they travel; None: as float32, as gradients
                do.
        """
        rows = self.rows if encoded is None else encoded
        of_ids, of_rows = (slots_bytes(self.job, float(each.max())) for each in (self.ids, rows))
        of_gradients = slots_bytes(self.job, float(self.rows.max())) if self.job.training else 0
        return of_ids + of_rows + of_gradients


def groups_of(plan: Iterable[PlacedTable], workload: Workload, job: Job) -> list[PlanGroup]:
    """Returns the groups of a plan, in the order of their first tables.

    Each shard of a table that is split by rows counts like the largest of them.
    """
    plan = list(plan)
    # A module looks all of its tables up in one way.
    by_fbgemm = {
        placed.table.module
        for placed in plan
        if not read_by_exchange(placed.table, job, placed.sharding_type)
    }
    groups: dict[tuple[str, str], PlanGroup] = {}
    for placed in plan:
        table = placed.table
        key = table.module, placed.sharding_type
        group = groups.setdefault(key, PlanGroup(*key, table.pooled, job))
        group.features += table.features
        rows = max(shard.rows for shard in placed.shards)
        reuse = workload.reuse_of(table)
        # Blocks of rows have one width, and there may be as many blocks as ranks.
        of_width = {
            columns: shard_traffic(table, reuse, job, placed.sharding_type, rows, columns)
            for columns in {shard.columns for shard in placed.shards}
        }
        if table.module in by_fbgemm:
            of_width = {columns: _by_fbgemm(traffic) for columns, traffic in of_width.items()}
        for shard in placed.shards:
            group.add(shard.rank, of_width[shard.columns])
    return list(groups.values())


def _by_fbgemm(traffic: ShardTraffic) -> ShardTraffic:
    return replace(traffic, lookup=replace(traffic.lookup, by_exchange=False))


def memory_of(
    plan: Iterable[PlacedTable],
    workload: Workload,
    job: Job,
    encoded: Callable[[PlanGroup], Floats] | None = None,
) -> list[float]:
    """Returns the bytes that each rank holds: shards, data in flight, slots and results.

    Args:
        plan: places of the tables.
        workload: the tables.
        job: job that the plan is for.
        encoded: function from a group to the bytes of its embeddings as they travel; float32 by
            default.
    """
    groups = groups_of(plan, workload, job)
    of_all = sum(result_bytes(table, workload.reuse_of(table), job) for table in workload.tables)
    of_all += sum(group.slots(encoded and encoded(group)) for group in groups)
    held: list[float] = np.sum([group.held for group in groups], axis=0).tolist()
    return [of_all + of_rank for of_rank in held]

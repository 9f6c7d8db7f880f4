"""The tables of a plan that share exchanges, with what each rank looks up and sends for them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..cost_interface import LookupWork
from .collectives import way_of
from .job import Job
from .shard_traffic import ShardTraffic, result_bytes, shard_traffic, slots_bytes
from .tables import PlacedTable, Workload


class PlanGroup:
    """The tables of a module that are sharded in the same way.

    Args:
        module: path of the module.
        sharding_type: of the tables.
        pooled: whether they are of an EmbeddingBagCollection.
        job: what the plan is for.

    Attributes:
        module: path of the module.
        sharding_type: of the tables.
        way: that their embeddings are exchanged.
        job: what the plan is for.
        works: by rank, then by bytes of a weight: what is looked up in one op.
        ids: (ranks,), bytes of ids and lengths for each rank, from each rank.
        rows: (ranks,), bytes of embeddings by each rank, for each rank.
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
        self.held = np.zeros(job.ranks)
        self.features = 0

    def add(self, rank: int, traffic: ShardTraffic) -> None:
        """Adds a shard that `rank` has."""
        work = traffic.lookup
        self.works[rank].setdefault(work.weight_bytes, []).append(work)
        self.ids[rank] += traffic.ids_per_rank
        self.rows[rank] += traffic.rows_per_rank
        self.held[rank] += traffic.held_bytes

    def slots(self) -> int:
        """Returns the bytes of the slots of its channels on each rank."""
        ids, rows = float(self.ids.max()), float(self.rows.max())
        return slots_bytes(self.job, ids) + self.job.ways_of_rows * slots_bytes(self.job, rows)


def groups_of(plan: Iterable[PlacedTable], workload: Workload, job: Job) -> list[PlanGroup]:
    """Returns the groups of a plan, in the order of their first tables.

    Shards of a table split by rows count as its largest one.
    """
    groups: dict[tuple[str, str], PlanGroup] = {}
    for placed in plan:
        table = placed.table
        key = table.module, placed.sharding_type
        group = groups.setdefault(key, PlanGroup(*key, table.pooled, job))
        group.features += table.features
        rows = max(shard.rows for shard in placed.shards)
        for shard in placed.shards:
            traffic = shard_traffic(table, workload.reuse_of(table), job, rows, shard.columns)
            group.add(shard.rank, traffic)
    return list(groups.values())


def memory_of(plan: Iterable[PlacedTable], workload: Workload, job: Job) -> list[float]:
    """Returns the bytes that each rank holds: shards, what is in flight, slots and results."""
    groups = groups_of(plan, workload, job)
    of_all = sum(result_bytes(table, workload.reuse_of(table), job) for table in workload.tables)
    of_all += sum(group.slots() for group in groups)
    held: list[float] = np.sum([group.held for group in groups], axis=0).tolist()
    return [of_all + of_rank for of_rank in held]

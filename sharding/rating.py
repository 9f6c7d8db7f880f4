"""What a plan is predicted to take, rank by rank, whoever made it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .estimates import CostModel, Estimate, LookupWork
from .job import Job
from .tables import PlacedTable, Workload
from .traffic import ShardTraffic, result_bytes, shard_traffic, slots_bytes

ZERO = Estimate(0.0, 0.0, 0.0)


def total(estimates: Iterable[Estimate]) -> Estimate:
    """Returns the sum, with the ends of the intervals added up: errors may all go one way."""
    each = list(estimates)
    return Estimate(
        sum(one.microseconds for one in each),
        sum(one.low for one in each),
        sum(one.high for one in each),
    )


def crowded(estimates: Sequence[Estimate], job: Job) -> Estimate:
    """Returns when all ranks are done: the slowest one, or all of them on the cores they share."""
    share = job.ranks_per_core / len(estimates)
    together = total(estimates)
    on_cores = Estimate(*(share * time for time in vars(together).values()))
    return max(*estimates, on_cores, key=lambda one: one.microseconds)


@dataclass(frozen=True)
class RankRating:
    """One rank in one step.

    Attributes:
        forward: its lookups.
        backward: their backward; nothing without training.
        ids: the exchange of the ids of its shards, if all ranks had as many.
        embeddings: that of its shards' embeddings, likewise, and of gradients when training.
        shard_bytes: weights, optimizer state and what iterations in flight keep.
        slot_bytes: of its bounded-lag channels.
        result_bytes: of the embeddings of its own samples.
        shards: that it holds.
    """

    forward: Estimate
    backward: Estimate
    ids: Estimate
    embeddings: Estimate
    shard_bytes: float
    slot_bytes: float
    result_bytes: float
    shards: int

    @property
    def compute(self) -> Estimate:
        """Forward and backward."""
        return total([self.forward, self.backward])

    @property
    def communication(self) -> Estimate:
        """All exchanges."""
        return total([self.ids, self.embeddings])

    @property
    def step(self) -> Estimate:
        """All of it."""
        return total([self.compute, self.communication])

    @property
    def memory_bytes(self) -> float:
        """All memory."""
        return self.shard_bytes + self.slot_bytes + self.result_bytes


@dataclass(frozen=True)
class Rating:
    """A plan's prediction.

    Attributes:
        ranks: each one's.
        step: from one step's start to the next one's. At bound 0 every phase takes as long as on
            its slowest rank, or as all ranks on the cores they share; above it the step as long as
            the slowest rank's sum.
        phases: the step's parts by name; at bound > 0 those of the slowest rank.
    """

    ranks: Sequence[RankRating]
    step: Estimate
    phases: dict[str, Estimate]


def rate(plan: Iterable[PlacedTable], workload: Workload, job: Job, model: CostModel) -> Rating:
    """Returns what `plan` is predicted to take.

    The tables of a module that are sharded in the same way share lookup and exchanges. An
    all-to-all takes as long as the rank that sends or receives most (performance modelling paper,
    sec. IV-A).
    """
    groups: dict[tuple[str, str], _Group] = {}
    for placed in plan:
        key = placed.table.module, placed.sharding_type
        group = groups.setdefault(key, _Group(job))
        for shard in placed.shards:
            traffic = shard_traffic(
                placed.table, workload.reuse_of(placed.table), job, shard.rows, shard.columns
            )
            group.add(shard.rank, traffic)
    each = list(groups.values())
    results = sum(result_bytes(table, workload.reuse_of(table), job) for table in workload.tables)
    slots = sum(group.slots() for group in each)
    ranks = []
    for rank in range(job.ranks):
        forward = total(model.lookup_forward(g.works[rank]) for g in each if g.works[rank])
        backward = ZERO
        if job.training:
            backward = total(model.lookup_backward(g.works[rank]) for g in each if g.works[rank])
        ids, embeddings = _exchanges(each, job, model, rank)
        held = sum(float(group.held[rank]) for group in each)
        shards = sum(len(group.works[rank]) for group in each)
        ranks.append(RankRating(forward, backward, ids, embeddings, held, slots, results, shards))
    return _with_step(ranks, each, job, model)


def _with_step(
    ranks: Sequence[RankRating], groups: Sequence[_Group], job: Job, model: CostModel
) -> Rating:
    if job.bound > 0:
        last = max(ranks, key=lambda rank: rank.step.microseconds)
        phases = {"ids": last.ids, "forward": last.forward, "embeddings": last.embeddings}
    else:
        ids, embeddings = _exchanges(groups, job, model, None)
        phases = {
            "ids": ids,
            "forward": crowded([rank.forward for rank in ranks], job),
            "embeddings": embeddings,
        }
        if job.training:
            phases["backward"] = crowded([rank.backward for rank in ranks], job)
    return Rating(ranks, total(phases.values()), phases)


class _Group:
    """The tables that share exchanges and a lookup op: bytes and works by rank."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.works: list[list[LookupWork]] = [[] for _ in range(job.ranks)]
        self.ids = np.zeros(job.ranks)  # for each rank, from each rank
        self.rows = np.zeros(job.ranks)  # by each rank, for each rank
        self.held = np.zeros(job.ranks)

    def add(self, rank: int, traffic: ShardTraffic) -> None:
        self.works[rank].append(traffic.lookup)
        self.ids[rank] += traffic.ids_per_rank
        self.rows[rank] += traffic.rows_per_rank
        self.held[rank] += traffic.held_bytes

    def slots(self) -> int:
        ways_back = 2 if self.job.training else 1
        ids, rows = float(self.ids.max()), float(self.rows.max())
        return slots_bytes(self.job, ids) + ways_back * slots_bytes(self.job, rows)


def _exchanges(
    groups: Sequence[_Group], job: Job, model: CostModel, rank: int | None
) -> tuple[Estimate, Estimate]:
    """Returns the times of ids, and of embeddings with gradients: as they are, or as on `rank`."""

    def time(by_holder: NDArray[np.float64]) -> Estimate:
        at_holder, at_others = by_holder * job.ranks, np.full(job.ranks, by_holder.sum())
        if rank is not None:
            at_holder = at_others = np.full(job.ranks, at_holder[rank])
        return model.all_to_all(at_others.tolist(), at_holder.tolist(), job.backend)

    ways_back = 2 if job.training else 1
    return (
        total(time(group.ids) for group in groups),
        total(time(group.rows) for group in groups for _ in range(ways_back)),
    )

"""The prediction of a plan, rank by rank, whoever made the plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cost_interface import CostModel, Estimate
from ..problem.collectives import Collective, Way, all_to_all_of
from ..problem.exchange_costs import exchanges_of, phase_us
from ..problem.job import Job
from ..problem.plan_groups import PlanGroup, groups_of
from ..problem.shard_traffic import result_bytes
from ..problem.tables import PlacedTable, Workload

ZERO = Estimate(0.0, 0.0, 0.0)


def total(estimates: Iterable[Estimate]) -> Estimate:
    """Returns the sum. The ends of the intervals add up, since all errors may go one way."""
    each = list(estimates)
    return Estimate(
        sum(one.microseconds for one in each),
        sum(one.low for one in each),
        sum(one.high for one in each),
    )


def crowded(estimates: Sequence[Estimate], job: Job) -> Estimate:
    """Returns the time until all ranks are done: the slowest rank, or all on the cores they
    share."""
    on_cores = _mean(estimates, job.ranks_per_core)
    return max(*estimates, on_cores, key=lambda one: one.microseconds)


def _mean(estimates: Sequence[Estimate], times: float = 1.0) -> Estimate:
    share = times / len(estimates)
    return Estimate(*(share * time for time in vars(total(estimates)).values()))


@dataclass(frozen=True)
class RankRating:
    """One rank in one step.

    Attributes:
        forward: time of its lookups.
        backward: time of their backward; nothing without training.
        ids: time of exchanging the ids of its shards, if all ranks had as many.
        embeddings: time of exchanging its shards' embeddings, if all ranks had as many; gradients
            are included when training.
        shard_bytes: bytes of weights, optimizer state and the data of iterations in flight.
        slot_bytes: bytes of its bounded-lag channels.
        result_bytes: bytes of the embeddings of its own samples.
        shards: number of shards that it holds.
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
        """Returns the time of forward and backward."""
        return total([self.forward, self.backward])

    @property
    def communication(self) -> Estimate:
        """Returns the time of all exchanges."""
        return total([self.ids, self.embeddings])

    @property
    def step(self) -> Estimate:
        """Returns the time of compute and communication."""
        return total([self.compute, self.communication])

    @property
    def memory_bytes(self) -> float:
        """Returns the bytes of all memory."""
        return self.shard_bytes + self.slot_bytes + self.result_bytes


@dataclass(frozen=True)
class Rating:
    """A plan's prediction.

    Attributes:
        ranks: rating of each rank.
        step: time from one step's start to the next one's. At bound 0 it is a sum over phases: each
            takes as long as on its slowest rank, or as all ranks on the cores they share. Above
            bound 0 it is the slowest rank's sum, or the mean sum where those cores decide.
        phases: parts of the step by name.
    """

    ranks: Sequence[RankRating]
    step: Estimate
    phases: dict[str, Estimate]


def rate(plan: Iterable[PlacedTable], workload: Workload, job: Job, model: CostModel) -> Rating:
    """Returns the prediction of `plan`, which is what the search minimises (options.Problem).

    The tables of a module that are sharded in the same way share exchanges. If their weights also
    have the same precision, they share a lookup.
    """
    each = groups_of(plan, workload, job)
    exchanges = _Exchanges(each, workload, job, model)
    results = sum(result_bytes(table, workload.reuse_of(table), job) for table in workload.tables)
    slots = sum(group.slots() for group in each)
    ranks = []
    for rank in range(job.ranks):
        ops = [works for group in each for works in group.works[rank].values()]
        ids, embeddings = exchanges.as_on(rank)
        ranks.append(
            RankRating(
                forward=total(map(model.lookup_forward, ops)),
                backward=total(map(model.lookup_backward, ops)) if job.training else ZERO,
                ids=ids,
                embeddings=embeddings,
                shard_bytes=sum(float(group.held[rank]) for group in each),
                slot_bytes=slots,
                result_bytes=results,
                shards=sum(map(len, ops)),
            )
        )
    phases = _lagging_phases(ranks, job) if job.bound else _phases(ranks, exchanges, job)
    return Rating(ranks, total(phases.values()), phases)


def _phases(ranks: Sequence[RankRating], exchanges: _Exchanges, job: Job) -> dict[str, Estimate]:
    """Returns the phases of ranks that wait in each phase for the slowest one."""
    ids, embeddings = exchanges.together()
    phases = {
        "ids": ids,
        "forward": crowded([rank.forward for rank in ranks], job),
        "embeddings": embeddings,
    }
    if job.training:
        phases["backward"] = crowded([rank.backward for rank in ranks], job)
    return phases


def _lagging_phases(ranks: Sequence[RankRating], job: Job) -> dict[str, Estimate]:
    """Returns the phases of the slowest rank, or the mean phases where cores decide."""
    slowest = max(ranks, key=lambda rank: rank.step.microseconds)
    alone = {"ids": slowest.ids, "forward": slowest.forward, "embeddings": slowest.embeddings}
    together = {
        "ids": _mean([rank.ids for rank in ranks]),
        "forward": _mean([rank.forward for rank in ranks], job.ranks_per_core),
        "embeddings": _mean([rank.embeddings for rank in ranks]),
    }
    return max(alone, together, key=lambda phases: total(phases.values()).microseconds)


class _Exchanges:
    """The exchanges of all groups. Those of a phase start together."""

    def __init__(
        self, groups: Sequence[PlanGroup], workload: Workload, job: Job, model: CostModel
    ) -> None:
        self._job, self._model = job, model
        self._costs = exchanges_of(workload, job, model)
        self._ways = [group.way for group in groups]
        self._ids = np.array([group.ids for group in groups])
        self._rows = np.array([group.rows for group in groups])

    def together(self) -> tuple[Estimate, Estimate]:
        """Returns the times of ids, and of embeddings with gradients."""
        return self._times(self._ids, self._rows)

    def as_on(self, rank: int) -> tuple[Estimate, Estimate]:
        """Returns the times of `together` if all ranks had as many bytes as `rank`."""
        every = np.full(self._job.ranks, rank)
        return self._times(self._ids[:, every], self._rows[:, every])

    def _times(
        self, ids: NDArray[np.float64], rows: NDArray[np.float64]
    ) -> tuple[Estimate, Estimate]:
        """Returns the times of (groups, ranks) bytes for each rank."""
        costs, number = self._costs, len(self._ways)
        of_ids = phase_us(costs.ids.per_byte * ids.sum(axis=0), costs.ids_imbalance)
        of_ids += number * costs.ids.constant
        each = [costs.embeddings[way] for way in self._ways]
        per_byte = np.array([way.per_byte for way in each])
        of_rows = phase_us(per_byte @ rows, costs.embeddings_imbalance)
        of_rows += sum(way.constant for way in each)
        one_of_ids = self._one([all_to_all_of(self._job)], ids)
        some_rows = [self._one(way.collectives, rows[self._which(way)]) for way in {*self._ways}]
        return _as_sure_as(of_ids, one_of_ids), _as_sure_as(of_rows, total(some_rows))

    def _which(self, way: Way) -> list[int]:
        return [number for number, other in enumerate(self._ways) if other == way]

    def _one(self, collectives: Sequence[Collective], for_each: NDArray[np.float64]) -> Estimate:
        """Returns the model's time of one group, if all groups have as many bytes."""
        mean = for_each.mean(axis=0)
        if self._job.ranks == 1:
            return ZERO
        return total(
            one.estimate(
                mean.tolist() if one.ranks == len(mean) else [float(mean.mean())] * one.ranks,
                self._job,
                self._model,
                self._job.ranks_per_core,
            )
            for one in collectives
        )


def _as_sure_as(time: float, one: Estimate) -> Estimate:
    """Returns the time, with the interval of an estimate in proportion."""
    scale = time / one.microseconds if one.microseconds > 0 else 1.0
    return Estimate(time, one.low * scale, one.high * scale)

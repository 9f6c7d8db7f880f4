"""The time of exchanges: one function for the search, its lower bound and the ratings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cost_interface import CostModel
from .collectives import Collective, Way, all_to_all_of, way_of
from .job import Job
from .shard_traffic import shard_traffic
from .tables import ROW_WISE, TABLE_ROW_WISE, TABLE_WISE, Workload


@dataclass(frozen=True)
class ExchangeCosts:
    """Microseconds of one exchange of a module's tables that are sharded in the same way.

    Attributes:
        constant: time that does not depend on the bytes.
        per_byte: time of a byte that a rank has for each rank.
    """

    constant: float
    per_byte: float


@dataclass(frozen=True)
class Exchanges:
    """Microseconds of the exchanges of a step. The exchanges of a phase start together.

    Attributes:
        ids: cost of all exchanges of ids.
        embeddings: costs of exchanging embeddings and, when training, gradients, by their way.
        ids_imbalance: weight of the rank with most ids to exchange, 0 to 1.
        embeddings_imbalance: the same for embeddings.
    """

    ids: ExchangeCosts
    embeddings: Mapping[Way, ExchangeCosts]
    ids_imbalance: float
    embeddings_imbalance: float

    def constant(self, way: Way) -> float:
        """Returns the time of exchanging tables that go this way, without the time of bytes."""
        return self.ids.constant + self.embeddings[way].constant


def phase_us(ranks_us: NDArray[np.float64], imbalance: float) -> float:
    """Returns the time of a phase from the time of each rank, (ranks)."""
    mean, largest = float(ranks_us.mean()), float(ranks_us.max())
    time: float = mean ** (1 - imbalance) * largest**imbalance
    return time


def exchanges_of(workload: Workload, job: Job, model: CostModel) -> Exchanges:
    """Returns the costs of a workload's exchanges.

    The costs depend on the workload alone, not on the plan. That makes plans comparable, and bounds
    provable.
    """
    whole = [
        (
            table,
            shard_traffic(table, workload.reuse_of(table), job, TABLE_WISE, table.rows, table.dim),
        )
        for table in workload.tables
    ]
    ids = sum(traffic.ids_per_rank for _, traffic in whole) / job.ranks
    rows = sum(traffic.rows_per_rank for _, traffic in whole) / job.ranks
    sums = sum(traffic.rows_per_rank for table, traffic in whole if table.pooled) / job.ranks
    one_to_all, number = all_to_all_of(job), job.exchanges_of_ids
    of_ids = _costs_at(one_to_all, job, model, ids)
    usual = way_of(job, TABLE_WISE, pooled=True)
    by_rows = {way_of(job, kind, pooled=True) for kind in (ROW_WISE, TABLE_ROW_WISE)} - {usual}
    return Exchanges(
        ids=ExchangeCosts(number * of_ids.constant, of_ids.per_byte),
        embeddings={
            usual: _costs_of(usual, job, model, rows),
            **{way: _costs_of(way, job, model, way.holders * sums) for way in by_rows},
        },
        ids_imbalance=_imbalance_at(one_to_all, job, model, ids),
        embeddings_imbalance=_imbalance_at(one_to_all, job, model, rows),
    )


def _costs_of(way: Way, job: Job, model: CostModel, for_each: float) -> ExchangeCosts:
    each = [_costs_at(part, job, model, for_each) for part in way.collectives]
    return ExchangeCosts(
        sum(costs.constant for costs in each), sum(costs.per_byte for costs in each)
    )


def _costs_at(collective: Collective, job: Job, model: CostModel, for_each: float) -> ExchangeCosts:
    """Returns a line through the model's times for `for_each` bytes and for twice as many.

    A rank alone exchanges nothing. If the model's time falls with more bytes, the line is flat. If
    the line would be negative at no bytes, it starts at 0.
    """
    if collective.ranks == 1:
        return ExchangeCosts(0.0, 0.0)
    at = _some(for_each, job)
    once, twice = (
        _time([size] * collective.ranks, collective, job, model) for size in (at, 2 * at)
    )
    rise = min(max(twice - once, 0.0), once)
    return ExchangeCosts(once - rise, rise / at)


def _imbalance_at(collective: Collective, job: Job, model: CostModel, for_each: float) -> float:
    """Returns how much it counts that one rank has twice the bytes of the others."""
    costs = _costs_at(collective, job, model, for_each)
    if costs.per_byte == 0:
        return 1.0
    at = _some(for_each, job)
    longest = _time([2 * at, 0.0, *[at] * (collective.ranks - 2)], collective, job, model)
    rise = costs.per_byte * at
    return math.log2(1 + min(max((longest - costs.constant - rise) / rise, 0.0), 1.0))


def _some(for_each: float, job: Job) -> float:
    return max(for_each, 1.0 / job.ranks)


def _time(for_each: Sequence[float], collective: Collective, job: Job, model: CostModel) -> float:
    return collective.estimate(for_each, job, model, job.ranks_per_core).microseconds

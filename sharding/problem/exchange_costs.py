"""The time of all-to-alls: one function for the search, its lower bound and the ratings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cost_interface import CostModel
from .job import Job
from .shard_traffic import shard_traffic
from .tables import Workload


@dataclass(frozen=True)
class ExchangeCosts:
    """Microseconds of all-to-alls that start together.

    Attributes:
        constant: of each of them.
        per_byte: of a byte of mean ** (1 - imbalance) * largest ** imbalance, with the ranks' bytes
            in all of them together.
        imbalance: 0 to 1, the larger the more the largest rank decides.
    """

    constant: float
    per_byte: float
    imbalance: float

    def microseconds(self, bytes_of_ranks: NDArray[np.float64], exchanges: int) -> float:
        """Returns the time of `exchanges` all-to-alls; (ranks,) bytes are those of all of them."""
        mean, largest = float(bytes_of_ranks.mean()), float(bytes_of_ranks.max())
        size: float = mean ** (1 - self.imbalance) * largest**self.imbalance
        return self.constant * exchanges + self.per_byte * size


def exchange_costs(
    workload: Workload, job: Job, model: CostModel
) -> tuple[ExchangeCosts, ExchangeCosts]:
    """Returns the costs of exchanging ids, and of exchanging embeddings one way.

    Only the workload decides on them, not the plan: that makes plans comparable, and bounds
    provable.
    """
    whole = [
        shard_traffic(table, workload.reuse_of(table), job, table.rows, table.dim)
        for table in workload.tables
    ]
    return (
        _costs_at(model, job, sum(traffic.ids_per_rank for traffic in whole)),
        _costs_at(model, job, sum(traffic.rows_per_rank for traffic in whole)),
    )


def _costs_at(model: CostModel, job: Job, bytes_per_rank: float) -> ExchangeCosts:
    """Returns what the model says at `bytes_per_rank`, at twice as much, and where one has twice.

    A rank alone exchanges nothing. Where the model falls with more bytes the line is flat, where it
    would be negative at no bytes it starts at 0.
    """
    if job.ranks == 1:
        return ExchangeCosts(0.0, 0.0, 1.0)
    at = max(bytes_per_rank, 1.0)
    even = [at] * job.ranks

    def time(sent: Sequence[float], received: Sequence[float]) -> float:
        return model.all_to_all(sent, received, job.backend, job.ranks_per_core).microseconds

    once, twice = time(even, even), time([2 * at] * job.ranks, [2 * at] * job.ranks)
    rise = min(max(twice - once, 0.0), once)
    imbalance = 1.0
    if rise > 0:
        one_has_twice = time(even, [2 * at, 0.0, *even[2:]])
        imbalance = math.log2(1 + min(max((one_has_twice - once) / rise, 0.0), 1.0))
    return ExchangeCosts(once - rise, rise / at, imbalance)

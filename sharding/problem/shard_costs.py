"""The cost of shards in each phase of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cost_interface import AdditiveCosts, Estimate, LookupWork, Ops
from .collectives import Way
from .exchange_costs import Exchanges
from .job import Job
from .shard_traffic import ShardTraffic


@dataclass(frozen=True)
class Phase:
    """A part of a step that ends for all ranks when the slowest one has done it (options.Problem).

    Attributes:
        costs: (shards), microseconds that a shard adds to its rank.
        shared: (shards), microseconds that a shard adds to the part that all ranks share.
        op_us: (ops), microseconds of a lookup op before any shard.
        imbalance: 0 where only the shared part counts, 1 where only the largest rank does.
    """

    costs: NDArray[np.float64]
    shared: NDArray[np.float64]
    op_us: NDArray[np.float64]
    imbalance: float


def phases_of(
    traffic: Sequence[ShardTraffic],
    ways: Sequence[Way],
    ops: Ops,
    job: Job,
    model: AdditiveCosts,
    exchanges: Exchanges,
) -> list[Phase]:
    """Returns the phases of a step.

    Args:
        traffic: traffic of the shards.
        ways: exchange of the embeddings of each shard.
        ops: op that looks up each shard.
        job: job that the plan is for.
        model: model of the lookups.
        exchanges: exchanges of ids and embeddings.
    """
    works = [shard.lookup for shard in traffic]
    first_of_op = [works[shard] for shard in np.unique(ops.of, return_index=True)[1]]

    def lookup(
        marginal: NDArray[np.float64],
        first_alone: NDArray[np.float64],
        op: Callable[[Sequence[LookupWork]], Estimate],
    ) -> Phase:
        costs = np.maximum(marginal, 0.0)
        whole = np.array([op([work]).microseconds for work in first_of_op])
        op_us = np.maximum(whole - np.maximum(first_alone, 0.0), 0.0)
        return Phase(costs, costs * job.ranks_per_core, op_us, 1.0)

    def exchange(costs: Iterable[float], imbalance: float) -> Phase:
        each = np.array(list(costs))
        return Phase(each, each, np.zeros(len(first_of_op)), imbalance)

    of_way = {way: costs.per_byte for way, costs in exchanges.embeddings.items()}
    phases = [
        exchange(
            (shard.ids_per_rank * exchanges.ids.per_byte for shard in traffic),
            exchanges.ids_imbalance,
        ),
        lookup(
            np.asarray(model.marginal_forward(works)),
            np.asarray(model.marginal_forward(first_of_op)),
            model.lookup_forward,
        ),
        # Gradients go the same way back. So the slowest rank of both exchanges is the same.
        exchange(
            (shard.rows_per_rank * of_way[way] for shard, way in zip(traffic, ways, strict=True)),
            exchanges.embeddings_imbalance,
        ),
    ]
    if job.training:
        backward = lookup(
            np.asarray(model.marginal_backward(works, ops)),
            np.asarray(model.marginal_backward(first_of_op)),
            model.lookup_backward,
        )
        phases.append(backward)
    return phases if job.bound == 0 else [_together(phases)]


def _together(phases: Sequence[Phase]) -> Phase:
    """Returns the one phase of ranks that wait only for the rank with the longest sum."""
    return Phase(
        np.sum([phase.costs for phase in phases], axis=0),
        np.sum([phase.shared for phase in phases], axis=0),
        np.sum([phase.op_us for phase in phases], axis=0),
        1.0,
    )

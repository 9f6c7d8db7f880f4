"""Memory for the bounded-lag channels of a plan, and memory left for shards."""

import numpy as np
from numpy.typing import NDArray

from ..problem.options import Problem
from ..problem.shard_traffic import slots_bytes
from .placement import Placement


def slots_of(placement: Placement) -> float:
    """Returns the bytes of slots on each rank. A channel's slots have the size of its largest
    message.

    Each module has channels for each of its groups of tables: one for ids, one for embeddings and,
    when training, one for gradients.
    """
    problem, job = placement.problem, placement.problem.job
    messages: dict[tuple[str, str], NDArray[np.float64]] = {}
    for option, ranks in zip(placement.option, placement.ranks, strict=True):
        chosen = problem.options[option]
        pair = (problem.tables[chosen.table].module, chosen.group)
        of_pair = messages.setdefault(pair, np.zeros((2, job.ranks)))
        traffic = problem.traffic[option]
        of_pair[:, ranks] += [[traffic.ids_per_rank], [traffic.rows_per_rank]]
    return sum(_slots(problem, *largest.max(axis=1)) for largest in messages.values())


def least_slots(problem: Problem) -> float:
    """Returns the least slots of any plan: one channel a way, equal messages, least bytes."""

    def mean_message(bytes_of_shards: list[float]) -> float:
        of_options = problem.option_shards * np.array(bytes_of_shards)
        least = np.minimum.reduceat(of_options, problem.first_options)
        return float(least.sum()) / problem.job.ranks

    ids = mean_message([shard.ids_per_rank for shard in problem.traffic])
    rows = mean_message([shard.rows_per_rank for shard in problem.traffic])
    return _slots(problem, ids, rows)


def _slots(problem: Problem, ids: float, rows: float) -> float:
    job = problem.job
    return slots_bytes(job, ids) + job.ways_of_rows * slots_bytes(job, rows)


def memory_for_shards(problem: Problem, slots: float) -> NDArray[np.float64]:
    """Returns the memory that each rank has for shards beside results and slots, (ranks), bytes."""
    apart = problem.job.host_memory_bytes is not None
    beside = problem.fixed_bytes + (0.0 if apart else slots)
    return np.array(problem.job.memory_bytes, float) - beside

"""A first plan: options for all tables, then places for shards, largest first, at least cost."""

import numpy as np
from numpy.typing import NDArray

from ..problem.options import ANY_RANKS, Problem
from .placement import Placement


def choose_options(
    problem: Problem, allowed: NDArray[np.bool_], most: float, price: float
) -> NDArray[np.intp]:
    """Returns for every table the cheapest option whose single shard is no larger than `most`.

    A table without such an option gets the one with the smallest shards.

    Args:
        problem: what is planned.
        allowed: (options), whether each may be used; every table has one.
        most: largest time of a shard, microseconds.
        price: microseconds that a byte of memory counts for.
    """
    first = problem.first_options
    shards = problem.option_shards
    shard = problem.costs @ problem.imbalance + price * problem.memory
    work = problem.shared.sum(axis=1) + price * problem.memory
    # Shards that are too large come far behind all others, the smallest of them first.
    too_large = np.maximum(shard - most, 0.0)
    key = np.where(allowed, shards * work + 1e6 * too_large, np.inf)
    ends = np.append(first[1:], len(key))
    return np.array([low + key[low:high].argmin() for low, high in zip(first, ends, strict=True)])


def at_best(problem: Problem, chosen: NDArray[np.intp]) -> float:
    """Returns the microseconds of a plan of the chosen options if the ranks are as even as
    possible, without constants of ops and charges."""
    shards, costs = problem.option_shards[chosen], problem.costs[chosen]
    even = shards @ costs / problem.job.ranks
    shared = shards @ problem.shared[chosen] / problem.job.ranks
    return float(problem.time(np.maximum(even, costs.max(axis=0)), shared).sum())


def place(
    problem: Problem,
    chosen: NDArray[np.intp],
    capacity: NDArray[np.float64],
    price: float,
) -> tuple[Placement, list[int]]:
    """Places the chosen options. Returns the tables that the memory had no room for, as well."""
    shards = problem.option_shards[chosen]
    # No phase can be faster than its largest shard, whatever the mean.
    mean = shards @ problem.shared[chosen] / problem.job.ranks
    scale = np.maximum(np.maximum(mean, problem.costs[chosen].max(axis=0)), 1e-9)
    placement = Placement(problem, capacity, scale)
    spread = problem.option_spread[chosen]
    # The order is by the share of a rank in each phase: a short phase is as hard to balance.
    size = problem.costs[chosen] / scale @ problem.imbalance
    size += price * problem.memory[chosen] / scale.sum()
    left_over = []
    # Shards without a choice of ranks go first.
    for table in np.lexsort((-size, spread == ANY_RANKS)):
        option = int(chosen[table])
        ranks, _ = placement.best_ranks(option)
        if ranks is None:
            left_over.append(int(table))
        else:
            placement.put(option, ranks)
    return placement, left_over

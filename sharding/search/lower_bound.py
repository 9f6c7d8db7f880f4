"""A time that no plan of a problem is below (proof: docs/design/planner.md)."""

import numpy as np
from numpy.typing import NDArray

from ..problem.options import Problem
from .infeasible import fits_somewhere


def lower_bound(
    problem: Problem, allowed: NDArray[np.bool_], capacity: NDArray[np.float64]
) -> float:
    """Returns a bound on the sum over phases, microseconds, without constants of ops and charges.

    Take a step with only one option's shard on a rank, and the least shared load. If such a step
    takes longer than T, the option is in no plan that takes T. The bound is the least T for which
    the remaining options can share costs of T x ranks in all, within the sum of `capacity` (a
    Lagrangian relaxation).

    Args:
        problem: what is planned.
        allowed: (options), whether each may be used.
        capacity: (ranks), bytes.

    Returns:
        The bound. It is infinity where no plan fits into the memory, or a table has no option.
    """
    ranks = problem.job.ranks
    shards = problem.option_shards
    usable = allowed & fits_somewhere(problem, capacity)
    first = problem.first_options
    if not np.maximum.reduceat(usable, first).all():
        return float(np.inf)
    memory = shards * problem.memory
    averages = np.where(usable[:, None], problem.shared * shards[:, None] / ranks, np.inf)
    least = np.minimum.reduceat(averages, first).sum(axis=0)
    at_least = problem.time(problem.costs, least).sum(axis=1)
    average = averages.sum(axis=1)

    def relaxed(limit: float) -> float:
        costs = np.where(at_least <= limit, average, np.inf)
        return _cheapest_within(costs, memory, capacity.sum(), first)

    low, high = 0.0, float(at_least.max(initial=0.0))
    at_most = relaxed(high)
    if at_most >= high:
        return at_most
    # relaxed falls as its limit grows. The bound is where it meets the limit.
    low = at_most
    for _ in range(40):
        middle = (low + high) / 2
        if relaxed(middle) <= middle:
            high = middle
        else:
            low = middle
    return low


def _cheapest_within(
    costs: NDArray[np.float64],
    memory: NDArray[np.float64],
    total: float,
    first: NDArray[np.intp],
) -> float:
    """Returns a bound on the least sum of costs, one option a table, with memory below `total`."""
    least_memory = least_of_tables(np.where(np.isfinite(costs), memory, np.inf), first)
    if least_memory > total:
        return float(np.inf)
    price = price_of_memory(costs, memory, total, first)
    return least_of_tables(costs + price * memory, first) - price * total


def least_of_tables(costs: NDArray[np.float64], first: NDArray[np.intp]) -> float:
    """Returns the sum over tables of the least cost of their options, (options)."""
    return float(np.minimum.reduceat(costs, first).sum())


def price_of_memory(
    costs: NDArray[np.float64],
    memory: NDArray[np.float64],
    total: float,
    first: NDArray[np.intp],
) -> float:
    """Returns a price of a byte at which the cheapest options need at most `total`. Of all such
    prices it is the one with the largest bound on their costs."""

    def dual(price: float) -> tuple[float, float]:
        """Returns the value at a price of memory, and the memory of the cheapest options."""
        priced = costs + price * memory
        least = np.minimum.reduceat(priced, first)
        taken = priced == np.repeat(least, np.diff(np.append(first, len(costs))))
        used = np.minimum.reduceat(np.where(taken, memory, np.inf), first).sum()
        return float(least.sum() - price * total), float(used)

    best, used = dual(0.0)
    if used <= total or not np.isfinite(best):
        return 0.0
    # The dual is concave. It rises as long as the cheapest options need more than there is.
    low, high = 0.0, max(best, 1e-9) / total
    while dual(high)[1] > total and high < 1e12:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        if dual(middle)[1] > total:
            low = middle
        else:
            high = middle
    return max(low, high, key=lambda price: dual(price)[0])

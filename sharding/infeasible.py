"""Why there is no plan: the constraint that binds, and by how much."""

import numpy as np
from numpy.typing import NDArray

from .options import ALL_RANKS, ANY_RANKS, ONE_HOST, Problem


class InfeasiblePlanError(Exception):
    """No plan fits into the memory.

    Args:
        constraint: what binds.
        needed: bytes.
        available: bytes.
        cure: what can be done.

    Attributes:
        short_by: bytes that are missing.
    """

    def __init__(self, constraint: str, needed: float, available: float, cure: str) -> None:
        self.constraint = constraint
        self.short_by = needed - available
        super().__init__(
            f"no plan fits: {constraint} needs {as_bytes(needed)}, but there are "
            f"{as_bytes(available)}: short by {as_bytes(self.short_by)}. {cure}"
        )


def as_bytes(amount: float) -> str:
    """Returns an amount of memory as text."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(amount) >= size:
            return f"{amount / size:,.2f} {unit}"
    return f"{amount:,.0f} bytes"


# Whose memory decides on whether an option fits.
_BINDING = {
    ANY_RANKS: "the largest rank",
    ONE_HOST: "the smallest rank of the best host",
    ALL_RANKS: "the smallest rank",
}


def fits_somewhere(problem: Problem, capacity: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns which options fit into the memory of empty ranks, (options)."""
    result: NDArray[np.bool_] = problem.memory <= _room(problem, capacity)
    return result


def _room(problem: Problem, capacity: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns what a shard of each option can have at most, (options) bytes."""
    room = {
        ANY_RANKS: capacity.max(),
        ONE_HOST: capacity.reshape(-1, problem.job.host_ranks).min(axis=1).max(),
        ALL_RANKS: capacity.min(),
    }
    return np.array([room[spread] for spread in problem.option_spread.tolist()])


def explain(
    problem: Problem, capacity: NDArray[np.float64], reserved: float, left_over: int | None
) -> InfeasiblePlanError:
    """Returns the error that names what binds.

    Args:
        problem: what is planned.
        capacity: (ranks), bytes for shards.
        reserved: bytes of each rank that are not for shards.
        left_over: a table for which the nearest attempt had no room.
    """
    kind = problem.job.memory_kind
    beside = f" beside {as_bytes(reserved)} for results and slots" if reserved else ""
    if capacity.min() < 0:
        return InfeasiblePlanError(
            f"what every rank holds whatever the plan (results and slots, in {kind})",
            reserved,
            float(capacity.min()) + reserved,
            "Use a smaller batch or bound, or more memory",
        )
    first = problem.first_options
    fits = fits_somewhere(problem, capacity)
    table_fits = np.maximum.reduceat(fits, first)
    least_shard = np.minimum.reduceat(problem.memory, first)
    if not table_fits.all():
        room = _room(problem, capacity)
        lacking = problem.memory - room
        # Of the table that lacks most, the option that lacks least.
        table = int(np.argmax(np.minimum.reduceat(lacking, first)))
        option = int(np.argmin(np.where(problem.option_table == table, lacking, np.inf)))
        chosen = problem.options[option]
        return InfeasiblePlanError(
            f"{kind} of {_BINDING[chosen.spread]}: a shard of table '{problem.tables[table].name}' "
            f"({chosen.sharding_type}, which comes nearest){beside}",
            float(problem.memory[option]),
            float(room[option]),
            "Allow sharding types or column widths that split it further, or use more ranks",
        )
    shards = problem.option_shards
    least = np.minimum.reduceat(np.where(fits, shards * problem.memory, np.inf), first)
    if least.sum() > capacity.sum():
        return InfeasiblePlanError(
            f"{kind} of all ranks together: the {len(least)} tables{beside} a rank",
            float(least.sum()),
            float(capacity.sum()),
            "Use more ranks or memory, or smaller tables",
        )
    name = problem.tables[left_over].name if left_over is not None else "?"
    smallest = float(least_shard[left_over]) if left_over is not None else 0.0
    free = float(capacity.sum() - least.sum())
    return InfeasiblePlanError(
        f"{kind} of single ranks: the tables fit in all, with {as_bytes(free)} to spare, but no "
        f"packing was found{beside}. The shards that are left over, those of table '{name}', each",
        smallest,
        min(free / problem.job.ranks, smallest),
        "Allow sharding types that split the large tables further, or use more memory",
    )

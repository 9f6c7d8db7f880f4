"""Why there is no plan: the constraint that binds, and by how much."""

import numpy as np
from numpy.typing import NDArray

from ..problem.options import ALL_RANKS, ANY_RANKS, ONE_HOST, Option, Problem
from .placement import Placement


class InfeasiblePlanError(Exception):
    """No plan fits into the memory.

    Args:
        constraint: constraint that binds.
        needed: bytes that are needed.
        available: bytes that there are.
        cure: what can be done about it.
        proven: False if a search that is not exhaustive found none.

    Attributes:
        short_by: bytes that are missing.
    """

    def __init__(
        self, constraint: str, needed: float, available: float, cure: str, *, proven: bool = True
    ) -> None:
        self.short_by = needed - available
        verdict = "no plan fits" if proven else "no plan was found that fits"
        super().__init__(
            f"{verdict}: {constraint} needs {as_bytes(needed)}, but there are "
            f"{as_bytes(available)}: short by {as_bytes(self.short_by)}. {cure}"
        )


def as_bytes(amount: float) -> str:
    """Returns an amount of memory as text."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(amount) >= size:
            return f"{amount / size:,.2f} {unit}"
    return f"{amount:,.0f} bytes"


def fits_somewhere(problem: Problem, capacity: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns which options fit into the memory of empty ranks, (options)."""
    result: NDArray[np.bool_] = problem.memory <= _room(problem, capacity)
    return result


def _room(problem: Problem, free: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the most that a shard of each option can have, (options) bytes, of (ranks) bytes."""
    descending = np.sort(free)[::-1]
    return np.select(
        [problem.option_spread == ANY_RANKS, problem.option_spread == ONE_HOST],
        [
            descending[problem.option_shards - 1],
            free.reshape(-1, problem.job.host_ranks).min(axis=1).max(),
        ],
        descending[-1],
    )


def _binding(option: Option) -> str:
    """Returns whose memory decides whether an option fits."""
    if option.spread == ONE_HOST:
        return "the smallest rank of the best host"
    if option.spread == ALL_RANKS:
        return "the smallest rank"
    return "the largest rank" if option.shards == 1 else f"the {option.shards} largest ranks"


def _beside(reserved: float) -> str:
    return f" beside {as_bytes(reserved)} for results and slots" if reserved else ""


def explain(
    problem: Problem, capacity: NDArray[np.float64], reserved: float
) -> InfeasiblePlanError:
    """Returns the error that names the binding constraint where no set of options can fit.

    Args:
        problem: what is planned.
        capacity: (ranks), bytes for shards.
        reserved: bytes of each rank that are not for shards.
    """
    kind, beside = problem.job.memory_kind, _beside(reserved)
    if capacity.min() < 0:
        return InfeasiblePlanError(
            f"what every rank holds whatever the plan (results and slots, in {kind})",
            reserved,
            float(capacity.min()) + reserved,
            "Use a smaller batch or bound, or more memory",
        )
    first = problem.first_options
    lacking = problem.memory - _room(problem, capacity)
    # The table that lacks most, and its option that lacks least.
    table = int(np.argmax(np.minimum.reduceat(lacking, first)))
    option = int(np.argmin(np.where(problem.option_table == table, lacking, np.inf)))
    if lacking[option] > 0:
        what = f"{problem.options[option].sharding_type}, which comes nearest"
        return _too_large(problem, capacity, beside, option, what)
    for widths in problem.collection_widths:
        option = _nearest_common(problem, widths, lacking)
        if lacking[option] > 0:
            columns = problem.options[option].columns
            what = f"{columns} columns, the common width of its EmbeddingCollection nearest to fit"
            return _too_large(problem, capacity, beside, option, what)
    return InfeasiblePlanError(
        f"{kind} of all ranks together: the {len(first)} tables{beside} a rank",
        least_memory(problem, lacking <= 0)[0],
        float(capacity.sum()),
        "Use more ranks or memory, or smaller tables",
    )


def explain_packing(
    placement: Placement, left_over: list[int], tried: int, reserved: float
) -> InfeasiblePlanError:
    """Returns the error to raise when no first plan has room for all tables.

    Args:
        placement: first plan with the fewest tables left over.
        left_over: options of these tables.
        tried: number of first plans.
        reserved: bytes of each rank that are not for shards.
    """
    problem = placement.problem
    room = _room(problem, placement.capacity - placement.memory)
    option = problem.options[left_over[0]]
    return InfeasiblePlanError(
        f"{problem.job.memory_kind} of single ranks: the tables fit in all, but none of {tried} "
        f"first plans packs them. The nearest one has no room for {len(left_over)} of them"
        f"{_beside(reserved)}, of which '{problem.tables[option.table].name}' "
        f"({option.sharding_type}), for a shard on {_binding(option)},",
        float(problem.memory[left_over[0]]),
        float(room[left_over[0]]),
        "Allow sharding types that split the large tables further, or use more memory",
        proven=False,
    )


def least_memory(problem: Problem, allowed: NDArray[np.bool_]) -> tuple[float, NDArray[np.bool_]]:
    """Returns the least bytes that all tables take, and the options with the widths of that plan.

    Each EmbeddingCollection has one width.
    """
    in_all = problem.option_shards * problem.memory

    def least(options: NDArray[np.bool_]) -> float:
        of_options = np.where(options, in_all, np.inf)
        return float(np.minimum.reduceat(of_options, problem.first_options).sum())

    for widths in problem.collection_widths:
        others = allowed & ~np.any(widths, axis=0)
        allowed = min((others | (allowed & width) for width in widths), key=least)
    return least(allowed), allowed


def _nearest_common(
    problem: Problem, widths: list[NDArray[np.bool_]], lacking: NDArray[np.float64]
) -> int:
    """Returns the option that lacks most, at the width of a collection that makes this least."""
    others = ~np.any(widths, axis=0)
    worst = []
    for width in widths:
        of_options = np.where(others | width, lacking, np.inf)
        least = np.minimum.reduceat(of_options, problem.first_options)
        # A table without any option of this width can't be the nearest one.
        table = int(np.argmax(least))
        mine = (problem.option_table == table) & (others | width)
        worst.append((float(least[table]), int(np.argmin(np.where(mine, lacking, np.inf)))))
    return min(worst)[1]


def _too_large(
    problem: Problem, capacity: NDArray[np.float64], beside: str, option: int, what: str
) -> InfeasiblePlanError:
    chosen = problem.options[option]
    return InfeasiblePlanError(
        f"{problem.job.memory_kind} of {_binding(chosen)}: a shard of table "
        f"'{problem.tables[chosen.table].name}' ({what}){beside}",
        float(problem.memory[option]),
        float(_room(problem, capacity)[option]),
        "Allow sharding types or column widths that split it further, or use more ranks",
    )

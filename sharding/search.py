"""The search for the plan whose slowest rank is fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from .greedy import choose_options, place
from .infeasible import InfeasiblePlanError, explain, fits_somewhere
from .local_search import improve, polish
from .lower_bound import lower_bound
from .options import Problem
from .placement import Placement
from .slots import least_slots, memory_for_shards, slots_of
from .tables import COLUMN_WISE, PlacedTable

# When options are chosen, shards of at most these shares of the lower bound are tried.
_SHARES = (1.0, 0.7, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.18, 0.125, 0.09)
# A full memory counts for this many times the lower bound, when options are chosen.
_PRICES = (0.0, 0.3, 3.0, 1e6)
# A plan this near to what its set of groups is expected to take is not improved further.
_NEAR = 1.002
# First plans that are improved; of larger problems fewer.
_STARTS, _STARTS_OF_LARGE, _LARGE = 3, 1, 500
# Sets of groups that are searched, the most promising first.
_SETS = 4
# Attempts to find room for the slots of the bounded-lag channels, whose size a plan decides.
_ATTEMPTS = 5


@dataclass(frozen=True)
class Found:
    """A plan and what is known of the best one.

    Attributes:
        plan: where everything is.
        objective: microseconds (options.Problem), the step of the plan's rating.
        lower_bound: microseconds; no plan's objective is below it.
        placement: the plan as the search has it.
    """

    plan: tuple[PlacedTable, ...]
    objective: float
    lower_bound: float
    placement: Placement


def search(problem: Problem) -> Found:
    """Returns the best plan found, the same one for the same problem.

    Raises:
        InfeasiblePlanError: none was found that fits into the memory.
    """
    slots, bound = least_slots(problem), np.inf
    for _ in range(_ATTEMPTS):
        placement, its_bound = _search_beside(problem, slots)
        # The first attempt's holds for all plans, the others' for those with as many slots.
        bound = min(bound, its_bound)
        used = slots_of(placement)
        if np.all(placement.memory <= memory_for_shards(problem, used)):
            break
        slots = max(used, 1.1 * slots)
    else:
        raise InfeasiblePlanError(
            "slots of the bounded-lag channels on each rank: the plan with most room for them",
            used,
            slots / 1.1,
            "Use a smaller batch or bound, or more memory",
        )
    host_memory = problem.job.host_memory_bytes
    if host_memory is not None and used > min(host_memory):
        raise InfeasiblePlanError(
            "DDR of one rank: the slots of the bounded-lag channels",
            used,
            min(host_memory),
            "Use a smaller batch or bound, or more memory",
        )
    plan = tuple(
        problem.options[option].placed(table, ranks.tolist())
        for table, option, ranks in zip(
            problem.tables, placement.option, placement.ranks, strict=True
        )
    )
    return Found(plan, placement.cost, bound, placement)


@dataclass(frozen=True)
class _Groups:
    """A set of groups that a plan may use.

    Attributes:
        expected: microseconds of a plan, if it is at the bound and all ranks have shards.
        number: of groups.
        bound: microseconds (lower_bound).
        least: microseconds that no plan with all of these groups, and none else, is below.
        allowed: (options), those of the groups.
    """

    expected: float
    number: int
    bound: float
    least: float
    allowed: NDArray[np.bool_]


def _search_beside(problem: Problem, slots: float) -> tuple[Placement, float]:
    """Returns the best plan found that leaves room for `slots`, and the lower bound."""
    capacity = memory_for_shards(problem, slots)
    reserved = float(np.max(problem.job.memory_bytes) - capacity.max())
    if capacity.min() < 0:
        raise explain(problem, capacity, reserved, None)
    fits = fits_somewhere(problem, capacity)
    modules = len({table.module for table in problem.tables})
    # The slowest rank of a phase has a shard, and so an op.
    one_op = float(problem.op_us.min(axis=0).sum())
    promising = []
    for names in _sets_of_groups(problem):
        allowed = fits & np.array([option.group in names for option in problem.options])
        if np.maximum.reduceat(allowed, problem.first_options).all():
            bound = lower_bound(problem, allowed, capacity)
            if np.isinf(bound):
                continue
            pairs = max(modules, len(names))
            ops = pairs * problem.job.ranks_per_core * one_op
            charges = pairs * problem.charge
            promising.append(
                _Groups(
                    expected=bound + charges + ops,
                    number=len(names),
                    bound=bound,
                    least=bound + charges + one_op,
                    allowed=allowed,
                )
            )
    # A plan uses just one of the sets, so that the least of their bounds is one for all plans.
    lowest = min((groups.least for groups in promising), default=np.inf)
    if not promising:
        raise explain(problem, capacity, reserved, None)
    promising.sort(key=lambda groups: (groups.expected, groups.number))
    starts: list[tuple[float, Placement, _Groups]] = []
    left_over = None
    for groups in promising[:_SETS]:
        found, left_over = _starts(problem, groups.allowed, capacity, groups.bound)
        starts.extend((start.cost, start, groups) for start in found)
    if not starts:
        raise explain(problem, capacity, reserved, left_over)
    starts.sort(key=lambda entry: entry[0])
    many = _STARTS if len(problem.options) < _LARGE else _STARTS_OF_LARGE
    improved = [
        (improve(start, groups.allowed, groups.expected * _NEAR), groups)
        for _, start, groups in starts[:many]
    ]
    best, groups = min(improved, key=lambda entry: entry[0].cost)
    polish(best, groups.allowed)
    return best, lowest


def _sets_of_groups(problem: Problem) -> Iterator[frozenset[str]]:
    """Yields the sets of groups that a plan may use at once."""
    groups = sorted({option.group for option in problem.options})
    for size in range(1, len(groups) + 1):
        for chosen in combinations(groups, size):
            # An EmbeddingCollection has one width of column-wise shards.
            if sum(group.startswith(f"{COLUMN_WISE} /") for group in chosen) <= 1:
                yield frozenset(chosen)


def _starts(
    problem: Problem,
    allowed: NDArray[np.bool_],
    capacity: NDArray[np.float64],
    bound: float,
) -> tuple[list[Placement], int | None]:
    """Returns first plans of the allowed options, or none and a table that found no room."""
    starts: list[Placement] = []
    fewest_left: list[int] = []
    for price in _PRICES:
        per_byte = price * bound / max(float(capacity.mean()), 1.0)
        for share in _SHARES:
            chosen = choose_options(problem, allowed, share * bound, per_byte)
            placement, left = place(problem, chosen, capacity, per_byte)
            if not left:
                starts.append(placement)
            elif not fewest_left or len(left) < len(fewest_left):
                fewest_left = left
        if starts:
            break
    return starts, fewest_left[0] if fewest_left else None

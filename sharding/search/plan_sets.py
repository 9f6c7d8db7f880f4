"""Sets of plans by the pairs of a module and a group that they use, the most promising first.

The costs of the pairs do not depend on the rest of a plan. There are many sets, but few of them
can beat a known plan: branch and bound over the pairs, with the bounds of the linear programme.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from ..problem.options import Problem
from ..problem.tables import COLUMN_WISE, TABLE_WISE
from .infeasible import least_memory
from .options_left import options_left
from .programme import Flags, Programme, Solution

# A pair is used, or not, up to the solver's rounding.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class PlanSet:
    """The plans that use all required pairs, and none but possible ones.

    Attributes:
        options: (options), whether plans may have each.
        required: (pairs), whether all plans use each.
        possible: (pairs), whether plans may use each.
        solution: best one of the programme.
    """

    options: Flags
    required: Flags
    possible: Flags
    solution: Solution


class PlanSets:
    """All plans of some options, in sets that each use certain pairs and no others.

    Args:
        problem: what is planned.
        programme: programme of the problem.
        capacity: (ranks), bytes.
        options: (options), those that plans may have.
        below: microseconds; sets whose plans all take as long need not be found.

    Attributes:
        below: as given; whoever goes through the sets may make it less.
        solved: number of programmes so far.
        unsolved: microseconds that no plan of the sets is below whose programme had no solution;
            infinity without such sets.
    """

    def __init__(
        self,
        problem: Problem,
        programme: Programme,
        capacity: NDArray[np.float64],
        options: Flags,
        below: float = np.inf,
    ) -> None:
        self.below, self.solved, self.unsolved = below, 0, float(np.inf)
        self._problem, self._programme = problem, programme
        self._memory = float(capacity.sum())
        self._pair = problem.op_pair[problem.option_op]
        self._widths = [
            [int(self._pair[width.argmax()]) for width in widths]
            for widths in problem.collection_widths
        ]
        self._order = count()
        self._waiting: list[tuple[float, int, PlanSet]] = []
        pairs = len(problem.charges)
        self._add(options, np.zeros(pairs, bool), np.ones(pairs, bool), 0.0)

    def __iter__(self) -> Iterator[PlanSet]:
        """Yields the sets, those with the least bound first."""
        while self._waiting:
            _, _, waiting = heapq.heappop(self._waiting)
            undecided = np.abs(waiting.solution.used - 0.5)
            if undecided.min() < 0.5 - _ROUNDING:
                for use in (False, True):
                    self._add_part(waiting, {int(undecided.argmin()): use})
                continue
            used = waiting.solution.used > 0.5
            options = waiting.options & used[self._pair]
            yield replace(waiting, options=options, required=used, possible=used)
            # All other plans, by the first pair in which they differ from these.
            as_these: dict[int, bool] = {}
            for pair in np.flatnonzero(waiting.possible & ~waiting.required).tolist():
                use = bool(used[pair])
                self._add_part(waiting, {**as_these, pair: not use})
                as_these[pair] = use

    def _add_part(self, plans: PlanSet, uses: dict[int, bool]) -> None:
        """Adds those of some plans that use, or don't use, certain pairs."""
        required, possible = plans.required.copy(), plans.possible.copy()
        pairs = list(uses)
        required[pairs] = possible[pairs] = list(uses.values())
        self._add(plans.options, required, possible, plans.solution.bound)

    def _add(self, options: Flags, required: Flags, possible: Flags, bound: float) -> None:
        """Adds the plans of a set, which are known to be no less than `bound`."""
        problem, first = self._problem, self._problem.first_options
        for widths in self._widths:
            if required[widths].any():
                # A collection has one width.
                possible[widths] &= required[widths]
        options = options & possible[self._pair]
        if np.isfinite(self.below) and np.maximum.reduceat(options, first).all():
            options = options_left(problem, options, required, self.below).options
        if not np.maximum.reduceat(options, first).all():
            return
        needed = np.bincount(self._pair[options], minlength=len(required)) > 0
        if (required & ~needed).any() or any(required[each].sum() > 1 for each in self._widths):
            return
        if least_memory(problem, options)[0] > self._memory:
            return
        self.solved += 1
        solution = self._programme.solved(options, required, possible)
        if solution is None:
            self.unsolved = min(self.unsolved, bound)
        elif solution.bound < self.below:
            plans = PlanSet(options, required, possible, solution)
            heapq.heappush(self._waiting, (solution.bound, next(self._order), plans))


def needless(problem: Problem) -> Flags:
    """Returns which options are whole tables that an option of another group equals, (options).

    A table of an EmbeddingBagCollection that is column-wise may be whole. The column-wise tables of
    an EmbeddingCollection share one width; beside them, whole ones are table-wise.
    """
    result = np.zeros(len(problem.options), bool)
    for module in {table.module for table in problem.tables}:
        tables = [table for table in problem.tables if table.module == module]
        pooled = all(table.pooled for table in tables)
        one, other = (TABLE_WISE, COLUMN_WISE) if pooled else (COLUMN_WISE, TABLE_WISE)
        if any(one in t.sharding_types and other not in t.sharding_types for t in tables):
            continue
        result |= [
            option.sharding_type == one
            and option.shards == 1
            and problem.tables[option.table].module == module
            for option in problem.options
        ]
    return result

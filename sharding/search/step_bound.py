"""A time that no plan's step is below (proof: docs/design/planner.md)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..problem.options import ALL_RANKS, Problem
from .dual_feasible import dual_feasible
from .infeasible import fits_somewhere
from .lower_bound import least_of_tables, price_of_memory
from .plan_families import PlanFamily, all_plans, plan_families
from .relaxation import Constants, of_largest, relax

# Limit of options in all families together: for 1,000 tables on 128 ranks some 60 sets.
_EFFORT = 300_000
# Precision of bounds, as a share; the second one where each try solves linear programmes.
_NEAR, _NEAR_RELAXED = 1e-4, 4e-3
# Options are left out, and the others are tried again, at most so many times.
_ROUNDS, _ROUNDS_RELAXED = 20, 3
_ROUNDING = 1e-9


def step_bound(problem: Problem, capacity: NDArray[np.float64], known: float) -> float:
    """Returns a bound on the objective of all plans, in microseconds; at most `known`.

    Args:
        problem: what is planned.
        capacity: (ranks), bytes.
        known: objective of a plan.
    """
    usable = fits_somewhere(problem, capacity)
    least, effort = known, 0
    for family in plan_families(problem, usable):
        if family.at_least >= least:
            break
        if effort >= _EFFORT:
            # No remaining set is below this one.
            every = _Proof(problem, capacity, all_plans(problem, usable)).bound(0.0, known)
            return max(family.at_least, min(every, least))
        least = _Proof(problem, capacity, family).bound(family.at_least, least)
        effort += len(problem.options)
    return least


class _Proof:
    """What can be proved of the plans of a family."""

    def __init__(self, problem: Problem, capacity: NDArray[np.float64], family: PlanFamily) -> None:
        self._problem, self._family = problem, family
        job, ranks = problem.job, problem.job.ranks
        self._by_all = problem.option_spread == ALL_RANKS
        self._means = problem.shared * problem.option_shards[:, None] / ranks
        work = self._means.sum(axis=1)
        memory = problem.option_shards * problem.memory
        options, first = family.options, problem.first_options
        total = float(capacity.sum())
        price = price_of_memory(np.where(options, work, np.inf), memory, total, first)
        self._work, self._allowance = work + price * memory, price * total
        # A phase takes at least so much of the mean load and so much of the largest rank's load.
        self._of_largest = of_largest(problem)
        self._every = problem.op_us[family.ops_of_all].sum(axis=0)
        beside = np.where(family.ops_of_all[problem.option_op], 0.0, 1.0)
        self._op_us = problem.op_us[problem.option_op] * beside[:, None]
        self._one_more = np.where(np.isfinite(family.one_more), family.one_more, 0.0)
        # All ranks' work on shared cores takes no longer than a rank that also has this op.
        crowded = job.ranks_per_core > 1 and self._every.any()
        on_mean = self._one_more * (job.ranks_per_core / ranks if crowded else 1.0)
        self._ops = job.ranks_per_core * self._every.sum() + on_mean.sum()
        self._capacity = capacity
        self._constants = Constants(self._every, self._op_us, on_mean)
        self._options = family.options

    def bound(self, low: float, high: float) -> float:
        """Returns the largest time found, between `low` and `high`, that no plan is below."""
        if self._impossible(high) or (proven := self._relaxed(high)) > high:
            return high
        low, top = max(low, proven), high
        while top - low > _NEAR * top:
            middle = (low + top) / 2
            if self._impossible(middle):
                low = middle
            else:
                top = middle
        top = high
        while top - low > _NEAR_RELAXED * top:
            middle = (low + top) / 2
            proven = self._relaxed(middle)
            if proven > middle:
                low = middle
            else:
                low, top = max(low, proven), middle
        return min(low, high)

    def _impossible(self, step: float) -> bool:
        """Returns whether no plan takes at most `step` microseconds. It looks at what tables take
        alone, together, and packed."""
        first = self._problem.first_options
        time = step - self._family.charges
        options, fixed, on_all, shared = self._left(time)
        if not np.maximum.reduceat(options, first).all():
            return True
        work = least_of_tables(np.where(options, self._work, np.inf), first) - self._allowance
        if work + self._ops > time:
            return True
        room = time - self._of_largest @ on_all - (1 - self._of_largest) @ shared
        is_fixed = fixed[self._problem.option_table]
        return self._too_large(options & ~is_fixed, ~fixed, float(room))

    def _relaxed(self, step: float) -> float:
        """Returns a bound of the plans that take `step` or less; infinity if there are none.

        After a step that may be possible, only smaller steps may be asked for."""
        first = self._problem.first_options
        time = (step - self._family.charges) * (1 + _ROUNDING)
        options, bound = self._options & self._left(time)[0], 0.0
        for _ in range(_ROUNDS_RELAXED):
            if not np.maximum.reduceat(options, first).all():
                return float(np.inf)
            relaxed = relax(self._problem, options, self._capacity, self._constants)
            if relaxed is None:
                break
            bound = max(bound, relaxed.bound)
            possible = options & (relaxed.bound + relaxed.excess <= time)
            if bound > time:
                return float(np.inf)
            if (possible == options).all():
                break
            options = possible
        self._options = options
        return bound + self._family.charges

    def _left(
        self, time: float
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.float64], NDArray[np.float64]]:
        """Returns the options that plans of at most `time` can have; (tables), whether a table can
        only be on all ranks; (phases), the least load on every rank, and the least shared load."""
        problem, first = self._problem, self._problem.first_options
        options = self._family.options
        for _ in range(_ROUNDS):
            fixed = ~np.maximum.reduceat(options & ~self._by_all, first)
            costs = np.where(options[:, None], problem.costs, np.inf)
            on_all = np.minimum.reduceat(costs, first)[fixed].sum(axis=0) + self._every
            means = np.where(options[:, None], self._means, np.inf)
            shared = np.minimum.reduceat(means, first).sum(axis=0)
            shared += problem.job.ranks_per_core * self._every
            is_fixed = fixed[problem.option_table]
            alone = on_all + np.where(is_fixed[:, None], 0.0, problem.costs + self._op_us)
            possible = options & (problem.time(alone, shared).sum(axis=1) <= time)
            if (possible == options).all() or not np.maximum.reduceat(possible, first).all():
                return possible, fixed, on_all, shared
            options = possible
        return options, fixed, on_all, shared

    def _too_large(
        self, options: NDArray[np.bool_], tables: NDArray[np.bool_], room: float
    ) -> bool:
        """Returns whether the tables can't be placed on ranks with `room` microseconds."""
        if not tables.any():
            return False
        problem = self._problem
        room -= float(self._of_largest @ self._one_more)
        if room <= 0:
            return True
        # Larger values than the room were left out, or they stay too large when they are cut off.
        shares = np.minimum(problem.costs @ self._of_largest / room, 1.0)
        enough = problem.job.ranks * (1 + 1e-9)
        for images in dual_feasible(shares):
            taken = np.where(options, problem.option_shards * images, np.inf)
            if np.minimum.reduceat(taken, problem.first_options)[tables].sum() > enough:
                return True
        return False

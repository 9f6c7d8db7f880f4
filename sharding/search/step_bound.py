"""A time that no plan's step is below (proof: docs/design/planner.md)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..problem.options import Problem
from .dual_feasible import dual_feasible
from .infeasible import fits_somewhere
from .options_left import OptionsLeft, options_left
from .plan_sets import PlanSet, PlanSets, needless
from .programme import Flags, Programme, of_largest, ops_of_all_ranks

# Most programmes for all sets together.
_EFFORT = 200
# Precision of bounds, as a share; the second one where each try solves programmes, the third one
# where each set does.
_NEAR, _NEAR_SOLVED, _NEAR_SETS = 1e-4, 4e-3, 1e-3
# Options are left out, and the others are tried again, at most so many times.
_ROUNDS = 3
_ROUNDING = 1e-9


def step_bound(problem: Problem, capacity: NDArray[np.float64], known: float) -> float:
    """Returns a bound on the objective of all plans, in microseconds; at most `known`.

    Args:
        problem: what is planned.
        capacity: (ranks), bytes.
        known: objective of a plan.
    """
    programme = Programme(problem, capacity)
    usable = fits_somewhere(problem, capacity) & ~needless(problem)
    sets = PlanSets(problem, programme, capacity, usable, known)
    least = known
    for plans in sets:
        bound = plans.solution.bound
        if bound >= least * (1 - _NEAR_SETS) or sets.solved > _EFFORT:
            # No remaining set is below this one.
            least = min(least, bound)
            break
        least = sets.below = _Proof(problem, programme, plans).bound(bound, least)
    return min(least, sets.unsolved)


class _Proof:
    """What can be proved of the plans of a set."""

    def __init__(self, problem: Problem, programme: Programme, plans: PlanSet) -> None:
        self._problem, self._programme, self._plans = problem, programme, plans
        self._of_largest = of_largest(problem)
        others = plans.required[problem.op_pair] & ~ops_of_all_ranks(problem)
        # The smallest op that is not of all ranks; one rank at least has such a one.
        one_more = problem.op_us[others].min(axis=0) if others.any() else 0.0
        self._one_more = float(np.sum(self._of_largest * one_more))

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
        while top - low > _NEAR_SOLVED * top:
            middle = (low + top) / 2
            proven = self._relaxed(middle)
            if proven > middle:
                low = middle
            else:
                low, top = max(low, proven), middle
        return min(low, high)

    def _left(self, step: float) -> OptionsLeft:
        return options_left(self._problem, self._plans.options, self._plans.required, step)

    def _impossible(self, step: float) -> bool:
        """Returns whether no plan takes at most `step` microseconds. It looks at what tables take
        alone, and packed."""
        left = self._left(step)
        if not self._each_has_one(left.options):
            return True
        time = step - float(self._problem.charges[self._plans.required].sum())
        room = time - self._of_largest @ left.on_all - (1 - self._of_largest) @ left.shared
        return self._too_large(left, float(room))

    def _relaxed(self, step: float) -> float:
        """Returns a bound of the plans that take `step` or less; infinity if there are none."""
        options, bound = self._left(step).options, 0.0
        for _ in range(_ROUNDS):
            if not self._each_has_one(options):
                return float(np.inf)
            solution = self._programme.solved(options, self._plans.required, self._plans.possible)
            if solution is None:
                break
            bound = max(bound, solution.bound)
            if bound > step:
                return float(np.inf)
            possible = options & (solution.bound + solution.excess <= step * (1 + _ROUNDING))
            if (possible == options).all():
                break
            options = possible
        return bound

    def _each_has_one(self, options: Flags) -> bool:
        return bool(np.maximum.reduceat(options, self._problem.first_options).all())

    def _too_large(self, left: OptionsLeft, room: float) -> bool:
        """Returns whether the tables that may be elsewhere than on all ranks can't be placed on
        ranks with `room` microseconds."""
        if left.fixed.all():
            return False
        problem = self._problem
        room -= self._one_more
        if room <= 0:
            return True
        # Larger values than the room were left out, or they stay too large when they are cut off.
        shares = np.minimum(problem.costs @ self._of_largest / room, 1.0)
        enough = problem.job.ranks * (1 + 1e-9)
        for images in dual_feasible(shares):
            taken = np.where(left.options, problem.option_shards * images, np.inf)
            if np.minimum.reduceat(taken, problem.first_options)[~left.fixed].sum() > enough:
                return True
        return False

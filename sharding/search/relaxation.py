"""Plans whose tables may be split between options: a linear programme.

Its solution is a lower bound of all plans of these options, and names the options of a good plan.
The proof of the bound needs only the programme's multipliers, not the way a solver found them
(docs/design/planner.md, lower bound, (4)).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_matrix, vstack

from ..problem.options import ALL_RANKS, Problem

Floats = NDArray[np.float64]
_Entries = tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]

# An option is left out if its shard exceeds its phase's longest rank by more than such a part. The
# parts come one after the other, until the rest is nearly a plan as the programme has it.
_TOO_LARGE = (0.3, 0.15, 0.08, 0.04, 0.02, 0.01, 0.0)
# Seconds of a programme, which takes milliseconds, or a few seconds with 1,000 tables. A solver
# that does not come to an end is given up, as one that finds nothing.
_LONGEST_S = 60.0


@dataclass(frozen=True)
class Constants:
    """The load of ranks beside shards, in microseconds (PlanFamily).

    Attributes:
        of_all: (phases), time of the ops that every rank runs.
        of_option: (options, phases), time of the op of an option's shards; 0 for ops of every rank.
        one_more: (phases), least time of the mean rank beside its shards and `of_all`.
    """

    of_all: Floats
    of_option: Floats
    one_more: Floats

    @staticmethod
    def none(problem: Problem) -> Constants:
        """Returns no load beside shards."""
        phases = np.zeros(len(problem.imbalance))
        return Constants(phases, np.zeros_like(problem.costs), phases)


@dataclass(frozen=True)
class Relaxed:
    """The best plan of options in parts.

    Attributes:
        bound: microseconds that the phases of every plan take at least, without charges.
        excess: (options), least time that the phases take more with an option; infinity for options
            that are not allowed.
        shares: (options), share of its table that each option has.
        longest: (phases), microseconds of the rank that has most.
        on_all: (phases), microseconds that every rank has.
    """

    bound: float
    excess: Floats
    shares: Floats
    longest: Floats
    on_all: Floats


def of_largest(problem: Problem) -> Floats:
    """Returns the least share of the largest rank's load in a phase's time, (phases); the mean load
    has the rest. It is the chord of the power `imbalance`."""
    ranks, e = problem.job.ranks, problem.imbalance
    return np.where(e < 1, (ranks**e - 1) / max(ranks - 1, 1), 1.0)


def relax(
    problem: Problem, allowed: NDArray[np.bool_], capacity: Floats, constants: Constants
) -> Relaxed | None:
    """Returns the relaxation of plans of some options, or None if the solver finds none.

    Args:
        problem: what is planned.
        allowed: (options), whether each may be used; every table has one.
        capacity: (ranks), bytes.
        constants: loads beside the shards.
    """
    programme = _Programme(problem, np.flatnonzero(allowed), capacity, constants)
    return programme.solved()


def relaxed_choice(
    problem: Problem, allowed: NDArray[np.bool_], capacity: Floats
) -> NDArray[np.intp] | None:
    """Returns each table's option in a good plan, or None if no relaxation was solved.

    Args:
        problem: what is planned.
        allowed: (options), whether each may be used; every table has one.
        capacity: (ranks), bytes.
    """
    none = Constants.none(problem)
    first, by_all = problem.first_options, problem.option_spread == ALL_RANKS
    chosen = None
    for too_large in _TOO_LARGE:
        relaxed = relax(problem, allowed, capacity, none)
        if relaxed is None:
            break
        ends = np.append(first[1:], len(by_all))
        ranges = zip(first.tolist(), ends.tolist(), strict=True)
        chosen = np.array([low + relaxed.shares[low:high].argmax() for low, high in ranges])
        beside = relaxed.on_all + np.where(by_all[:, None], 0.0, problem.costs)
        over = (beside / np.maximum(relaxed.longest, 1e-9)).max(axis=1)
        if over[chosen].max() <= 1:
            break
        over = np.where(allowed, over, np.inf)
        least = np.repeat(np.minimum.reduceat(over, first), np.diff([*first, len(over)]))
        allowed = allowed & (over <= np.maximum(1 + too_large, least))
    return chosen


class _Programme:
    """The linear programme of a relaxation.

    Its variables are the share of each option, and for each phase the longest rank and the load
    that is on all ranks. Two kinds of ranks are no longer than the longest one: the mean rank, and
    each rank with a shard of a table, which has the load on all ranks beside it.
    """

    def __init__(
        self, problem: Problem, options: NDArray[np.intp], capacity: Floats, constants: Constants
    ) -> None:
        self._problem, self._options, self._constants = problem, options, constants
        self._table = problem.option_table[options]
        self._by_all = problem.option_spread[options] == ALL_RANKS
        # Loads that several tables have on all ranks may share an op. Then the op is none of their
        # own.
        ops = np.where(self._by_all[:, None], 0.0, constants.of_option[options])
        self._costs = problem.costs[options] + ops
        shards = problem.option_shards[options]
        self._means = problem.shared[options] * shards[:, None] / problem.job.ranks
        self._memory = shards * problem.memory[options] / max(float(capacity.sum()), 1.0)
        self._of_largest = of_largest(problem)
        # Tables that may be elsewhere than on all ranks, and the row of each option.
        apart = np.flatnonzero(~self._by_all)
        self._tables, row = np.unique(self._table[apart], return_inverse=True)
        self._apart, self._row = apart, row

    def solved(self) -> Relaxed | None:
        """Returns the solution, with what its multipliers prove."""
        options, phases, rows = len(self._options), len(self._of_largest), len(self._tables)
        every, each_row = np.arange(options), np.arange(rows)
        longest, on_all = options + np.arange(phases), options + phases + np.arange(phases)
        variables = options + 2 * phases
        constants, crowd = self._constants, self._problem.job.ranks_per_core
        # The left sides and the right ones, of inequalities ("at most") and of equations.
        most: list[csr_matrix] = []
        exactly = [_matrix(len(self._problem.tables), variables, [(self._table, every, 1.0)])]
        at_most: list[Floats] = []
        for phase in range(phases):
            costs = self._costs[:, phase]
            mean: list[_Entries] = [(0, every, self._means[:, phase]), (0, longest[phase], -1.0)]
            shard: list[_Entries] = [
                (self._row, self._apart, costs[self._apart]),
                (each_row, on_all[phase], 1.0),
                (each_row, longest[phase], -1.0),
            ]
            by_all: list[_Entries] = [
                (0, every, np.where(self._by_all, costs, 0.0)),
                (0, on_all[phase], -1.0),
            ]
            of_all = constants.of_all[phase]
            most += [_matrix(1, variables, mean), _matrix(rows, variables, shard)]
            at_most += [-crowd * of_all - constants.one_more[[phase]], np.full(rows, -of_all)]
            exactly.append(_matrix(1, variables, by_all))
        most.append(_matrix(1, variables, [(0, every, self._memory)]))
        at_most.append(np.ones(1))
        shared = self._means @ (1 - self._of_largest)
        solution = linprog(
            np.concatenate([shared, self._of_largest, np.zeros(phases)]),
            A_ub=vstack(most),
            b_ub=np.concatenate(at_most),
            A_eq=vstack(exactly),
            b_eq=np.concatenate([np.ones(len(self._problem.tables)), np.zeros(phases)]),
            method="highs",
            options={"time_limit": _LONGEST_S},
        )
        if solution.status != 0:
            return None
        multipliers = np.maximum(-solution.ineqlin.marginals, 0.0)
        of_phases = multipliers[:-1].reshape(phases, 1 + rows)
        bound, excess = self._proven(of_phases, float(multipliers[-1]))
        shares = np.zeros(len(excess))
        shares[self._options] = solution.x[:options]
        return Relaxed(bound, excess, shares, solution.x[longest], solution.x[on_all])

    def _proven(self, of_phases: Floats, of_memory: float) -> tuple[float, Floats]:
        """Returns the bound and each option's excess that any multipliers prove.

        Args:
            of_phases: (phases, 1 + tables), multipliers of the mean rank and of the ranks with a
                table's shard; not negative.
            of_memory: multiplier of the memory; not negative.
        """
        # The solver's multipliers have rounding errors: those of a phase must sum up to all of it.
        whole = of_phases.sum(axis=1)
        of_phases = np.where(
            whole[:, None] > 0,
            of_phases * (self._of_largest / np.maximum(whole, 1e-300))[:, None],
            np.eye(1, of_phases.shape[1]) * self._of_largest[:, None],
        )
        mean, single = of_phases[:, 0], of_phases[:, 1:]
        constants, crowd = self._constants, self._problem.job.ranks_per_core
        on_means = 1 - self._of_largest + mean
        cost = self._means @ on_means + of_memory * self._memory
        cost += np.where(self._by_all, self._costs @ single.sum(axis=1), 0.0)
        cost[self._apart] += (self._costs[self._apart] * single.T[self._row]).sum(axis=1)
        of_options = np.full(len(self._problem.options), np.inf)
        of_options[self._options] = cost
        first = self._problem.first_options
        least = np.minimum.reduceat(of_options, first)
        bound = float(least.sum()) - of_memory + float(mean @ constants.one_more)
        bound += float((crowd * on_means + single.sum(axis=1)) @ constants.of_all)
        return bound, of_options - np.repeat(least, np.diff([*first, len(of_options)]))


def _matrix(rows: int, columns: int, entries: list[_Entries]) -> csr_matrix:
    """Returns the matrix of some entries: their rows, columns and values."""
    each = [[np.ravel(part) for part in np.broadcast_arrays(*entry)] for entry in entries]
    row, column, value = (np.concatenate([entry[part] for entry in each]) for part in range(3))
    return csr_matrix((value, (row, column)), shape=(rows, columns))

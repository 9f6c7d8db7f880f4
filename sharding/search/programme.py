"""A linear programme of which every plan is a solution: tables, ops and pairs may be used in parts.

Its optimum is a lower bound of all plans, and names the options of a good plan. The proof of the
bound needs only multipliers, not the way a solver found them (docs/design/planner.md, lower bound).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from ..problem.options import ALL_RANKS, Problem

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
# Rows, columns and values, which are broadcast.
_Entries = tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]

# An option is left out if its shard exceeds its phase's longest rank by more than such a part. The
# parts come one after the other, until the rest is nearly a plan as the programme has it.
_TOO_LARGE = (0.3, 0.15, 0.08, 0.04, 0.02, 0.01, 0.0)
# Seconds of a programme, which takes milliseconds, or a few seconds with 1,000 tables. A solver
# that does not come to an end is given up, as one that finds nothing.
_LONGEST_S = 60.0


@dataclass(frozen=True)
class Solution:
    """The best plan in parts.

    Attributes:
        bound: microseconds that no plan is below.
        excess: (options), least time that a plan with an option takes above the bound; infinity for
            options that are not allowed.
        shares: (options), share of its table that each option has.
        used: (pairs), part of its charge that each pair has.
        longest: (phases), microseconds of the rank that has most.
        on_all: (phases), microseconds that every rank has.
    """

    bound: float
    excess: Floats
    shares: Floats
    used: Floats
    longest: Floats
    on_all: Floats


def of_largest(problem: Problem) -> Floats:
    """Returns the least share of the largest rank's load in a phase's time, (phases); the mean load
    has the rest. It is the chord of the power `imbalance`."""
    ranks, e = problem.job.ranks, problem.imbalance
    return np.where(e < 1, (ranks**e - 1) / max(ranks - 1, 1), 1.0)


class Programme:
    """The programme of a problem.

    Its variables are the share of each option, the use of each op and pair (options.Problem), and
    four loads of each phase: of the mean rank, of the longest one, of all row-wise tables on every
    rank, and of the smallest op in use that is not row-wise.

    Args:
        problem: what is planned.
        capacity: (ranks), bytes.
    """

    def __init__(self, problem: Problem, capacity: Floats) -> None:
        self._ends = np.cumsum(
            [len(problem.options), len(problem.op_pair), len(problem.charges)]
            + 4 * [len(problem.imbalance)]
        )
        variables = np.split(np.arange(self._ends[-1]), self._ends[:-1])
        self._share, op_used, self._used, mean, self._longest, self._on_all, _ = variables
        # The variables of each option's op and pair.
        self._op = op_used[problem.option_op]
        self._pair = self._used[problem.op_pair[problem.option_op]]
        rows = _Rows()
        _add_uses(rows, problem, variables)
        for phase in range(len(problem.imbalance)):
            _add_phase(rows, problem, variables, phase)
        memory = problem.option_shards * problem.memory / max(float(capacity.sum()), 1.0)
        rows.at_most(1.0, (0, self._share, memory))
        self._at_most, self._right = rows.matrix(int(self._ends[-1]))
        tables = len(problem.tables)
        self._one_each = csr_matrix(
            (np.ones(len(self._share)), (problem.option_table, self._share)),
            shape=(tables, int(self._ends[-1])),
        )
        self._cost = np.zeros(self._ends[-1])
        self._cost[mean] = 1 - of_largest(problem)
        self._cost[self._longest] = of_largest(problem)
        self._cost[self._used] = problem.charges
        self._upper = np.ones(self._ends[-1])
        self._upper[self._ends[2] :] = np.tile(_more_than_any_load(problem), 4)
        self._lower = np.zeros(self._ends[-1])
        # Their rows alone say how long these are, so that options have what they add to them.
        for loads in (mean, self._longest, self._on_all):
            self._lower[loads] = -self._upper[loads]

    def solved(self, allowed: Flags, required: Flags, possible: Flags) -> Solution | None:
        """Returns the best solution of the plans that use all required pairs and only possible
        ones; None if the solver finds none.

        Args:
            allowed: (options), whether each may be used; every table has one.
            required: (pairs), whether each must be used.
            possible: (pairs), whether each may be used.
        """
        lower, upper = self._lower.copy(), self._upper.copy()
        upper[self._share] = allowed
        lower[self._used], upper[self._used] = required, possible
        found = linprog(
            self._cost,
            A_ub=self._at_most,
            b_ub=self._right,
            A_eq=self._one_each,
            b_eq=np.ones(self._one_each.shape[0]),
            bounds=np.stack([lower, upper], axis=1),
            method="highs",
            options={"time_limit": _LONGEST_S},
        )
        if found.status != 0:
            return None
        of_rows, of_tables = np.minimum(found.ineqlin.marginals, 0.0), found.eqlin.marginals
        reduced = self._cost - self._at_most.T @ of_rows - self._one_each.T @ of_tables
        bound = float(of_rows @ self._right + of_tables.sum())
        bound += float(np.minimum(reduced * lower, reduced * upper).sum())
        # What is added by a share, an op or a pair that is 1 and need not be.
        more = np.maximum(reduced, 0.0) * (1 - lower)
        excess = more[self._share] + more[self._op] + more[self._pair]
        return Solution(
            bound,
            np.where(allowed, excess, np.inf),
            found.x[self._share],
            found.x[self._used],
            found.x[self._longest],
            found.x[self._on_all],
        )


def relaxed_choice(
    programme: Programme, problem: Problem, allowed: Flags, pairs: Flags
) -> NDArray[np.intp] | None:
    """Returns each table's option in a good plan, or None if no programme was solved.

    Args:
        programme: programme of the problem.
        problem: what is planned.
        allowed: (options), whether each may be used; every table has one.
        pairs: (pairs), those of the allowed options.
    """
    first, by_all = problem.first_options, problem.option_spread == ALL_RANKS
    ends = np.append(first[1:], len(by_all))
    chosen = None
    for too_large in _TOO_LARGE:
        relaxed = programme.solved(allowed, pairs, pairs)
        if relaxed is None:
            break
        ranges = zip(first.tolist(), ends.tolist(), strict=True)
        chosen = np.array([low + relaxed.shares[low:high].argmax() for low, high in ranges])
        beside = relaxed.on_all + np.where(by_all[:, None], 0.0, problem.costs)
        over = (beside / np.maximum(relaxed.longest, 1e-9)).max(axis=1)
        if over[chosen].max() <= 1:
            break
        over = np.where(allowed, over, np.inf)
        least = np.repeat(np.minimum.reduceat(over, first), ends - first)
        allowed = allowed & (over <= np.maximum(1 + too_large, least))
    return chosen


def _add_uses(rows: _Rows, problem: Problem, variables: list[NDArray[np.intp]]) -> None:
    """Adds that an option needs its op, an op its pair, and a pair an op; and that a collection
    has one width."""
    share, op_used, used, *_ = variables
    ops = len(op_used)
    of_table = problem.option_table * ops + problem.option_op
    each, row = np.unique(of_table, return_inverse=True)
    rows.at_most(0.0, (row, share, 1.0), (np.arange(len(each)), op_used[each % ops], -1.0))
    each_op, of_op = np.arange(ops), problem.op_pair
    rows.at_most(0.0, (each_op, op_used, 1.0), (each_op, used[of_op], -1.0))
    rows.at_most(0.0, (np.arange(len(used)), used, 1.0), (of_op, op_used, -1.0))
    for widths in problem.collection_widths:
        pairs = [problem.op_pair[problem.option_op[width.argmax()]] for width in widths]
        rows.at_most(1.0, (0, used[pairs], 1.0))


def _add_phase(
    rows: _Rows, problem: Problem, variables: list[NDArray[np.intp]], phase: int
) -> None:
    """Adds what the loads of a phase are at least."""
    share, op_used = variables[:2]
    mean, longest, on_all, one = (each[phase] for each in variables[3:])
    ranks, crowd = problem.job.ranks, problem.job.ranks_per_core
    by_all = problem.option_spread == ALL_RANKS
    costs, op_us = problem.costs[:, phase], problem.op_us[:, phase]
    means = problem.shared[:, phase] * problem.option_shards / ranks
    of_all = ops_of_all_ranks(problem)
    every, others = np.flatnonzero(of_all), np.flatnonzero(~of_all)
    rows.at_most(0.0, (0, share, means), (0, op_used[every], crowd * op_us[every]), (0, mean, -1.0))
    rows.at_most(
        0.0, (0, share[by_all], costs[by_all]), (0, op_used[every], op_us[every]), (0, on_all, -1.0)
    )
    # A rank with a shard of a table that is not row-wise.
    tables, row = np.unique(problem.option_table[~by_all], return_inverse=True)
    with_op = costs + op_us[problem.option_op]
    each = np.arange(len(tables))
    apart = (row, share[~by_all], with_op[~by_all])
    rows.at_most(0.0, apart, (each, on_all, 1.0), (each, longest, -1.0))
    for op in others:
        cheaper = others[op_us[others] < op_us[op]]
        rows.at_most(
            0.0, (0, op_used[op], op_us[op]), (0, op_used[cheaper], -op_us[op]), (0, one, -1.0)
        )
    # All ranks' work on shared cores takes no longer than a rank that also has this op.
    in_mean = crowd / ranks if crowd > 1 and len(every) else 1.0
    rows.at_most(0.0, (0, mean, 1.0), (0, one, in_mean), (0, longest, -1.0))
    if in_mean < 1:
        largest = op_us[others].max(initial=0.0)
        without = (0, op_used[every], -largest)
        rows.at_most(0.0, (0, mean, 1.0), (0, one, 1.0), without, (0, longest, -1.0))


def ops_of_all_ranks(problem: Problem) -> Flags:
    """Returns for each op whether it is of row-wise tables, which all ranks have, (ops)."""
    first = np.unique(problem.option_op, return_index=True)[1]
    return np.asarray(problem.option_spread[first] == ALL_RANKS)


def _more_than_any_load(problem: Problem) -> Floats:
    """Returns microseconds that no load of a plan is above, (phases)."""
    means = problem.shared * problem.option_shards[:, None] / problem.job.ranks
    of_tables = np.maximum.reduceat(np.maximum(problem.costs, means), problem.first_options)
    ops = max(problem.job.ranks_per_core, 1.0) * problem.op_us.sum(axis=0)
    return np.asarray(of_tables.sum(axis=0) + ops)


class _Rows:
    """Inequalities: sums of variables that are at most something."""

    def __init__(self) -> None:
        self._entries: list[list[NDArray[np.float64]]] = []
        self._right: list[Floats] = []
        self._rows = 0

    def at_most(self, right: float, *entries: _Entries) -> None:
        """Adds rows, which the entries number from 0, with `right` on their right sides."""
        added = 0
        for entry in entries:
            row, column, value = (np.ravel(part) for part in np.broadcast_arrays(*entry))
            if len(row):
                added = max(added, int(row.max()) + 1)
                self._entries.append([row + self._rows, column, value])
        self._right.append(np.full(added, right))
        self._rows += added

    def matrix(self, variables: int) -> tuple[csr_matrix, Floats]:
        """Returns the matrix of all rows, and the right sides."""
        row, column, value = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        matrix = csr_matrix((value, (row, column)), shape=(self._rows, variables))
        return matrix, np.concatenate(self._right)

"""Which options a plan can have that takes at most some time: what each table takes alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..problem.options import ALL_RANKS, Problem
from .programme import Flags, Floats, ops_of_all_ranks

# Options are left out, and the others are tried again, at most so many times.
_ROUNDS = 20
_ROUNDING = 1e-9


@dataclass(frozen=True)
class OptionsLeft:
    """The options of plans of at most some time, and what these plans have at least.

    Attributes:
        options: (options), whether a plan can have each.
        fixed: (tables), whether a table can only be row-wise.
        on_all: (phases), microseconds on every rank.
        shared: (phases), microseconds that ranks share.
    """

    options: Flags
    fixed: Flags
    on_all: Floats
    shared: Floats


def options_left(problem: Problem, options: Flags, required: Flags, time: float) -> OptionsLeft:
    """Returns what is left of `options` in plans of at most `time`.

    Args:
        problem: what is planned.
        options: (options), those that plans may have; every table has one.
        required: (pairs), whether all these plans use each.
        time: microseconds of a step.
    """
    first, by_all = problem.first_options, problem.option_spread == ALL_RANKS
    means = problem.shared * problem.option_shards[:, None] / problem.job.ranks
    ops = _required_ops_of_all_ranks(problem, required)
    every = problem.op_us[ops].sum(axis=0)
    of_own_op = np.where(ops[problem.option_op][:, None], 0.0, problem.op_us[problem.option_op])
    for _ in range(_ROUNDS):
        fixed = ~np.maximum.reduceat(options & ~by_all, first)
        costs = np.where(options[:, None], problem.costs, np.inf)
        on_all = np.minimum.reduceat(costs, first)[fixed].sum(axis=0) + every
        of_means = np.where(options[:, None], means, np.inf)
        shared = np.minimum.reduceat(of_means, first).sum(axis=0)
        shared += problem.job.ranks_per_core * every
        is_fixed = fixed[problem.option_table]
        alone = on_all + np.where(is_fixed[:, None], 0.0, problem.costs + of_own_op)
        phases = problem.time(alone, shared).sum(axis=1)
        charges = _charges_with(problem, options, required)
        possible = options & (phases + charges <= time * (1 + _ROUNDING))
        if (possible == options).all() or not np.maximum.reduceat(possible, first).all():
            break
        options = possible
    return OptionsLeft(possible, fixed, on_all, shared)


def _required_ops_of_all_ranks(problem: Problem, required: Flags) -> Flags:
    """Returns for each op whether every rank runs it, (ops)."""
    # A pair whose weights have several precisions may have an op without tables.
    alone = np.bincount(problem.op_pair)[problem.op_pair] == 1
    result: Flags = ops_of_all_ranks(problem) & alone & required[problem.op_pair]
    return result


def _charges_with(problem: Problem, options: Flags, required: Flags) -> Floats:
    """Returns the least charges of plans with each option and all required pairs, (options)."""
    pair = problem.op_pair[problem.option_op]
    names, of_table = np.unique([table.module for table in problem.tables], return_inverse=True)
    module = of_table[problem.option_table]
    # A module without a required pair has at least its cheapest one.
    least = np.full(len(names), np.inf)
    np.minimum.at(least, module[options], problem.charges[pair[options]])
    least[np.unique(module[required[pair]])] = 0.0
    others = least.sum() - least[module]
    own = np.where(required[pair], 0.0, problem.charges[pair])
    return np.asarray(problem.charges[required].sum() + others + own)

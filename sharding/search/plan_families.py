"""Families of plans: all plans that exchange by the same pairs of a module and a group
(options.Problem).

The costs of the pairs do not depend on the rest of a plan. There are many families, but few of them
can beat a known plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ..problem.options import ALL_RANKS, Problem


@dataclass(frozen=True)
class PlanFamily:
    """The plans that use each of some pairs of module and group, and no other pair.

    Attributes:
        options: (options), whether each is of one of these pairs.
        charges: microseconds of their exchanges that don't depend on bytes.
        ops_of_all: (ops), whether every rank runs it.
        one_more: (phases), microseconds of the smallest other op; infinity where every rank runs
            all.
        at_least: microseconds that every such plan takes at least.
    """

    options: NDArray[np.bool_]
    charges: float
    ops_of_all: NDArray[np.bool_]
    one_more: NDArray[np.float64]
    at_least: float

    @staticmethod
    def joined(of_modules: Sequence[PlanFamily]) -> PlanFamily:
        """Returns the plans of one family of each module."""
        return PlanFamily(
            np.any([family.options for family in of_modules], axis=0),
            sum(family.charges for family in of_modules),
            np.any([family.ops_of_all for family in of_modules], axis=0),
            np.min([family.one_more for family in of_modules], axis=0),
            sum(family.at_least for family in of_modules),
        )


def plan_families(problem: Problem, usable: NDArray[np.bool_]) -> Iterator[PlanFamily]:
    """Yields the families of all plans of the usable options, the smallest `at_least` first."""
    modules = sorted({table.module for table in problem.tables})
    each = [
        sorted(_of_module(problem, usable, m), key=lambda family: family.at_least) for m in modules
    ]
    if not all(each):
        return

    def joined(chosen: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        return sum(families[i].at_least for families, i in zip(each, chosen, strict=True)), chosen

    waiting = [joined((0,) * len(each))]
    seen = {waiting[0][1]}
    while waiting:
        _, chosen = heapq.heappop(waiting)
        yield PlanFamily.joined([families[i] for families, i in zip(each, chosen, strict=True)])
        for module in range(len(each)):
            following = (*chosen[:module], chosen[module] + 1, *chosen[module + 1 :])
            if following[module] < len(each[module]) and following not in seen:
                seen.add(following)
                heapq.heappush(waiting, joined(following))


def all_plans(problem: Problem, usable: NDArray[np.bool_]) -> PlanFamily:
    """Returns all plans of the usable options, whatever pairs they use."""
    charges, _ = least_charges(problem, usable)
    none = np.zeros(len(problem.op_pair), bool)
    return PlanFamily(usable, charges, none, problem.op_us.min(axis=0), 0.0)


def least_charges(problem: Problem, options: NDArray[np.bool_]) -> tuple[float, int]:
    """Returns the microseconds of the least charge of each module's `options`, and the modules."""
    names, of_table = np.unique([table.module for table in problem.tables], return_inverse=True)
    charges = problem.charges[problem.op_pair[problem.option_op]]
    least = np.full(len(names), np.inf)
    np.minimum.at(least, of_table[problem.option_table][options], charges[options])
    return float(least.sum()), len(names)


def _of_module(problem: Problem, usable: NDArray[np.bool_], module: str) -> Iterator[PlanFamily]:
    """Yields the families of a module. A family leaves its tables no other options."""
    tables = np.array([table.module == module for table in problem.tables])
    mine = usable & tables[problem.option_table]
    pair_of_option = problem.op_pair[problem.option_op]
    work = problem.shared.sum(axis=1) * problem.option_shards / problem.job.ranks
    of_all = _ops_of_all_ranks(problem)
    for pairs in _pairs_together(problem, np.unique(pair_of_option[mine])):
        options = mine & np.isin(pair_of_option, pairs)
        least = np.minimum.reduceat(np.where(options, work, np.inf), problem.first_options)
        if not np.isfinite(least[tables]).all():
            continue
        ops = np.isin(problem.op_pair, pairs)
        charges = float(problem.charges[pairs].sum())
        every = problem.job.ranks_per_core * float(problem.op_us[ops & of_all].sum())
        yield PlanFamily(
            options,
            charges,
            ops & of_all,
            problem.op_us[ops & ~of_all].min(axis=0, initial=np.inf),
            float(least[tables].sum()) + charges + every,
        )


def _ops_of_all_ranks(problem: Problem) -> NDArray[np.bool_]:
    """Returns for each op whether all ranks run it if its pair is used at all, (ops)."""
    first = np.unique(problem.option_op, return_index=True)[1]
    # A pair whose weights have several precisions may have an op without tables.
    alone = np.bincount(problem.op_pair)[problem.op_pair] == 1
    result: NDArray[np.bool_] = (problem.option_spread[first] == ALL_RANKS) & alone
    return result


def _pairs_together(problem: Problem, pairs: NDArray[np.intp]) -> Iterator[list[int]]:
    """Yields the sets of a module's pairs. Of an EmbeddingCollection's widths a set has at most
    one."""
    first = np.unique(problem.op_pair[problem.option_op], return_index=True)[1]
    widths = [pair for pair in pairs.tolist() if "/" in problem.options[first[pair]].group]
    others = [pair for pair in pairs.tolist() if pair not in widths]
    for number in range(len(others) + 1):
        for chosen in combinations(others, number):
            for width in ([], *([each] for each in widths)):
                if chosen or width:
                    yield [*chosen, *width]

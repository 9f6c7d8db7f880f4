"""Sets of options to search plans in, the most promising first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ..problem.options import Problem
from ..problem.tables import COLUMN_WISE
from .infeasible import fits_somewhere, least_memory
from .lower_bound import lower_bound
from .plan_families import least_charges
from .relaxation import Constants, relax

# Number of sets that a slower method puts in order, a linear programme each.
_RELAXED = 8
# Number of these that are also searched without the ways that are not worth their charges.
_FEWER_WAYS = 2
_ROUNDING = 1e-9


@dataclass(frozen=True)
class PlanOptions:
    """Options that a plan may use.

    Attributes:
        expected: microseconds of a plan that is at the bound and has shards on all ranks.
        number: number of ways among the options.
        bound: microseconds that no plan is below (lower_bound).
        allowed: (options,), whether each is in the set.
    """

    expected: float
    number: int
    bound: float
    allowed: NDArray[np.bool_]


def option_sets(problem: Problem, capacity: NDArray[np.float64]) -> list[PlanOptions]:
    """Returns the sets of options that plans may use, the most promising first. There is none if no
    plan fits into the memory.

    Args:
        problem: what is planned.
        capacity: (ranks), bytes.
    """
    fits = fits_somewhere(problem, capacity)
    one_op = problem.job.ranks_per_core * float(problem.op_us.min(axis=0).sum())
    found: list[PlanOptions] = []
    for number, of_ways in _sets_of_ways(problem):
        beside, modules = least_charges(problem, of_ways)
        beside += max(number - modules, 0) * problem.charges.min() + max(number, modules) * one_op
        found.extend(
            PlanOptions(bound + beside, number, bound, allowed)
            for bound, allowed in _with_one_width(problem, fits & of_ways, capacity)
        )
    if not found:
        return []
    return _by_relaxation(problem, _without_equivalents(problem, found), capacity)


def _sets_of_ways(problem: Problem) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Yields the sets of ways that a plan may use at once: their number, and their options.

    Ways are sharding types. Column-wise sharding counts as one way for EmbeddingBagCollections and
    as another one for EmbeddingCollections.
    """
    ways = [
        (kind, kind == COLUMN_WISE and not problem.tables[option.table].pooled)
        for option in problem.options
        for kind in [option.sharding_type]
    ]
    names = sorted(set(ways))
    for size in range(1, len(names) + 1):
        for chosen in combinations(names, size):
            yield size, np.array([way in chosen for way in ways])


def _with_one_width(
    problem: Problem, allowed: NDArray[np.bool_], capacity: NDArray[np.float64]
) -> list[tuple[float, NDArray[np.bool_]]]:
    """Returns sets of the allowed options, with bounds of their plans.

    In a set each EmbeddingCollection has one width for its column-wise tables. The collections get
    their widths one after the other: the width with the least bound, while later collections may
    still mix widths. Of the last collection all widths are returned. Without a plan there is no
    set.
    """
    widths = [[allowed & width for width in widths] for widths in problem.collection_widths]
    widths = [[width for width in each if width.any()] for each in widths]
    sets = [(0.0, allowed)]
    for of_collection in (each for each in widths if each):
        _, before = min(sets, key=lambda entry: entry[0])
        others = before & ~np.any(of_collection, axis=0)
        sets = [_bounded(problem, others | width, capacity) for width in of_collection]
    if not any(widths):
        sets = [_bounded(problem, allowed, capacity)]
    if not any(np.isfinite(bound) for bound, _ in sets):
        # Widths that were best while others could mix widths left no room for these others.
        sets = [_bounded(problem, least_memory(problem, allowed)[1], capacity)]
    return [entry for entry in sets if np.isfinite(entry[0])]


def _bounded(
    problem: Problem, allowed: NDArray[np.bool_], capacity: NDArray[np.float64]
) -> tuple[float, NDArray[np.bool_]]:
    return lower_bound(problem, allowed, capacity), allowed


def _without_equivalents(problem: Problem, found: list[PlanOptions]) -> list[PlanOptions]:
    """Returns the sets, the most promising first. Of sets that make up the same plans it keeps one:
    a column-wise shard that is a whole table is a table-wise one."""
    shapes: dict[tuple[int, int, int, int], int] = {}
    shape = np.array(
        [
            shapes.setdefault((o.table, o.rows, o.columns, o.spread), len(shapes))
            for o in problem.options
        ]
    )
    merged: dict[bytes, PlanOptions] = {}
    for options in sorted(found, key=lambda options: (options.expected, options.number)):
        merged.setdefault(np.unique(shape[options.allowed]).tobytes(), options)
    return list(merged.values())


def _by_relaxation(
    problem: Problem, found: list[PlanOptions], capacity: NDArray[np.float64]
) -> list[PlanOptions]:
    """Returns the sets in a new order of the first ones: by the relaxation, which is slower."""
    looked_at = []
    for options in found[:_RELAXED]:
        relaxed = relax(problem, options.allowed, capacity, Constants.none(problem))
        more = max(relaxed.bound - options.bound, 0.0) if relaxed else 0.0
        looked_at.append(
            replace(options, expected=options.expected + more, bound=options.bound + more)
        )
    looked_at.sort(key=lambda options: options.expected)
    fewer = [_worth_their_charges(problem, each, capacity) for each in looked_at[:_FEWER_WAYS]]
    fewer.sort(key=lambda options: options.expected)
    sets: dict[bytes, PlanOptions] = {}
    for options in [*fewer, *looked_at, *found[_RELAXED:]]:
        sets.setdefault(options.allowed.tobytes(), options)
    return list(sets.values())


def _worth_their_charges(
    problem: Problem, options: PlanOptions, capacity: NDArray[np.float64]
) -> PlanOptions:
    """Returns a set without some pairs of a module and a group (options.Problem): those that save
    less than their charges."""
    pair = problem.op_pair[problem.option_op]

    def relaxed_of(allowed: NDArray[np.bool_]) -> tuple[float, float, NDArray[np.bool_]]:
        """Returns time and bound, and the options of the used pairs."""
        enough = np.maximum.reduceat(allowed, problem.first_options).all()
        relaxed = relax(problem, allowed, capacity, Constants.none(problem)) if enough else None
        if relaxed is None:
            return np.inf, np.inf, allowed
        used = np.unique(pair[relaxed.shares > _ROUNDING])
        charges = float(problem.charges[used].sum())
        return relaxed.bound + charges, relaxed.bound, allowed & np.isin(pair, used)

    best = relaxed_of(options.allowed)
    while True:
        pairs = np.unique(pair[best[2]])
        fewer = [relaxed_of(best[2] & (pair != each)) for each in pairs]
        least = min(fewer, key=lambda each: each[0])
        if not least[0] < best[0]:
            break
        best = least
    if not np.isfinite(best[0]):
        return options
    expected = min(best[0], options.expected)
    return replace(options, expected=expected, bound=best[1], allowed=best[2])

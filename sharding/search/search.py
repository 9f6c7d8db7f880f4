"""The search for the plan whose slowest rank is fastest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ..problem.options import Problem
from ..problem.tables import COLUMN_WISE, TABLE_WISE, PlacedTable
from .greedy import at_best, choose_options, place
from .infeasible import (
    InfeasiblePlanError,
    explain,
    explain_packing,
    fits_somewhere,
    least_memory,
)
from .local_search import improve, polish
from .placement import Placement
from .plan_sets import PlanSets, needless
from .programme import Flags, Programme, relaxed_choice
from .slot_memory import least_slots, memory_for_shards, slots_of
from .step_bound import step_bound

# Largest shares of the lower bound that a shard may have when options are chosen; each is tried.
_SHARES = (1.0, 0.7, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.18, 0.125, 0.09)
# When options are chosen, a full memory counts as this many times the lower bound.
_PRICES = (0.0, 0.3, 3.0, 1e6)
# A plan this near to the bound of its set of options is not improved further.
_NEAR = 1.002
# Number of first plans that are improved; fewer for larger problems.
_STARTS, _STARTS_OF_LARGE, _LARGE = 3, 1, 500
# First plans for each set of a large problem: placing a thousand tables takes a tenth of a second.
_PLACED_OF_LARGE = 2
# Number of sets of options that are searched, those with the least bound, beside the sets of one
# way. Large problems get fewer. If they give no plan, the set that takes least memory follows.
_SETS, _SETS_OF_LARGE = 4, 2
# Attempts to find room for the slots of the bounded-lag channels, whose size depends on the plan.
_ATTEMPTS = 5


@dataclass(frozen=True)
class SearchResult:
    """A plan, and what is known of the best plan.

    Attributes:
        plan: places of all tables.
        objective: microseconds (options.Problem), the step of the plan's rating.
        lower_bound: microseconds that no plan's objective is below.
        placement: the plan as the search stores it.
        others: other plans that the search improved, the best first.
    """

    plan: tuple[PlacedTable, ...]
    objective: float
    lower_bound: float
    placement: Placement
    others: tuple[SearchResult, ...] = ()


@dataclass(frozen=True)
class OptionSet:
    """Options that a plan may use.

    Attributes:
        allowed: (options), whether each is in the set.
        bound: microseconds that no plan of them is below.
        pairs: (pairs), those of the options.
        one_way: whether all have the same sharding type.
    """

    allowed: Flags
    bound: float
    pairs: Flags
    one_way: bool = False


def search(problem: Problem) -> SearchResult:
    """Returns the best plan found, the same one for the same problem.

    Raises:
        InfeasiblePlanError: no plan was found that fits into the memory.
    """
    slots = least_slots(problem)
    placements = _search_with_room_for_slots(problem, slots)
    _check_host_memory(problem, slots_of(placements[0]))
    # No plan has smaller slots.
    bound = step_bound(problem, memory_for_shards(problem, slots), placements[0].cost)
    found: dict[tuple[PlacedTable, ...], SearchResult] = {}
    for placement in placements:
        plan = _whole_tables_as_such(
            [
                problem.options[option].placed(table, ranks.tolist())
                for table, option, ranks in zip(
                    problem.tables, placement.option, placement.ranks, strict=True
                )
            ]
        )
        found.setdefault(plan, SearchResult(plan, placement.cost, bound, placement))
    best, *others = found.values()
    return replace(best, others=tuple(others))


def _whole_tables_as_such(plan: Sequence[PlacedTable]) -> tuple[PlacedTable, ...]:
    """Returns the plan with column-wise tables of one piece made table-wise, where that is allowed.

    A table stays as it is if its module has others of either way, with which it shares exchanges.

    Both ways have the same rating. But an EmbeddingCollection puts columns together again even if
    there is nothing to put together. That took 1.6 to 1.9 times as long in measured steps.
    """
    of_module: defaultdict[str, list[PlacedTable]] = defaultdict(list)
    for placed in plan:
        of_module[placed.table.module].append(placed)
    whole = {
        module
        for module, tables in of_module.items()
        if not any(placed.sharding_type == TABLE_WISE for placed in tables)
        and all(
            len(placed.shards) == 1 and TABLE_WISE in placed.table.sharding_types
            for placed in tables
            if placed.sharding_type == COLUMN_WISE
        )
    }
    return tuple(
        replace(placed, sharding_type=TABLE_WISE)
        if placed.sharding_type == COLUMN_WISE and placed.table.module in whole
        else placed
        for placed in plan
    )


def _search_with_room_for_slots(problem: Problem, slots: float) -> list[Placement]:
    """Returns the best plan found that has room for its own slots, then other improved plans that
    have room. No plan has smaller slots than `slots`."""
    least = enough = slots
    too_many = short_by = np.inf
    for _ in range(_ATTEMPTS):
        try:
            plans = _search_beside(problem, slots)
        except InfeasiblePlanError:
            if slots == least:
                raise
            too_many = slots
        else:
            placement, used = plans[0], slots_of(plans[0])
            if _has_room_for_slots(problem, placement):
                return [plan for plan in plans if _has_room_for_slots(problem, plan)]
            room = float((memory_for_shards(problem, 0.0) - placement.memory).min())
            if used - room < short_by:
                short_by, nearest = used - room, (used, room)
            too_few, enough = slots, max(used, 1.1 * slots)
        slots = enough if enough < too_many else (too_few + too_many) / 2
    raise InfeasiblePlanError(
        f"{problem.job.memory_kind} of the fullest rank: the slots of the bounded-lag channels, "
        f"beside the shards of the nearest of the plans found in {_ATTEMPTS} attempts,",
        *nearest,
        "Use a smaller batch or bound, or more memory",
        proven=False,
    )


def _has_room_for_slots(problem: Problem, plan: Placement) -> bool:
    return bool(np.all(plan.memory <= memory_for_shards(problem, slots_of(plan))))


def _check_host_memory(problem: Problem, used: float) -> None:
    """Raises InfeasiblePlanError if a plan's slots exceed a rank's part of a host's memory."""
    host_memory = problem.job.host_memory_bytes
    if host_memory is None or used <= min(host_memory):
        return
    least = least_slots(problem)
    proven = least > min(host_memory)
    raise InfeasiblePlanError(
        "DDR of one rank: the slots of the bounded-lag channels"
        + (", whatever the plan," if proven else " of the best plan, no other of which was tried,"),
        least if proven else used,
        min(host_memory),
        "Use a smaller batch or bound, or more memory",
        proven=proven,
    )


def _search_beside(problem: Problem, slots: float) -> list[Placement]:
    """Returns plans that leave room for `slots`, the best first."""
    capacity = memory_for_shards(problem, slots)
    reserved = float(np.max(problem.job.memory_bytes) - capacity.max())
    if capacity.min() < 0:
        raise explain(problem, capacity, reserved)
    usable = fits_somewhere(problem, capacity)
    needed, of_least_memory = least_memory(problem, usable)
    if needed > capacity.sum():
        raise explain(problem, capacity, reserved)
    programme = Programme(problem, capacity)
    sets = _option_sets(problem, programme, usable, capacity)
    pair = problem.op_pair[problem.option_op[of_least_memory]]
    used = np.bincount(pair, minlength=len(problem.charges)) > 0
    last = OptionSet(of_least_memory, 0.0, used)
    starts: list[tuple[float, Placement, OptionSet]] = []
    nearest: list[tuple[Placement, list[int]]] = []
    large = len(problem.options) >= _LARGE
    most = _PLACED_OF_LARGE if large else len(_SHARES)
    tried = tqdm([*sets, last], **_progress("placing tables", "set of options"))
    for number, options in enumerate(tried):
        if number == len(sets) and starts:
            break
        found, left = _starts(problem, programme, options, capacity, most)
        starts.extend((start.cost, start, options) for start in found)
        nearest.extend(left)
    if not starts:
        placement, left_over = min(nearest, key=lambda attempt: len(attempt[1]))
        raise explain_packing(placement, left_over, len(nearest), reserved)
    plans = []
    for start, options in tqdm(
        _worth_improving(starts, large), **_progress("improving plans", "plan")
    ):
        plan = improve(start, options.allowed, options.bound * _NEAR)
        polish(plan, options.allowed)
        plans.append(plan)
    return sorted(plans, key=lambda plan: plan.cost)


def _progress(what: str, unit: str) -> dict[str, Any]:
    # A thousand tables take half a minute. Without a terminal nobody looks.
    return {"desc": what, "unit": unit, "leave": False, "disable": None}


def _option_sets(
    problem: Problem, programme: Programme, usable: Flags, capacity: NDArray[np.float64]
) -> list[OptionSet]:
    """Returns the most promising sets of the usable options to search plans in."""
    most = _SETS_OF_LARGE if len(problem.options) >= _LARGE else _SETS
    every = PlanSets(problem, programme, capacity, usable & ~needless(problem))
    found = [OptionSet(p.options, p.solution.bound, p.required) for p in islice(every, most)]
    # People try one way for all tables by hand. The result must not be worse.
    for of_way in _of_one_way(problem, usable):
        for plans in islice(PlanSets(problem, programme, capacity, of_way), 1):
            found = [each for each in found if (each.allowed != plans.options).any()]
            bound = plans.solution.bound
            found.append(OptionSet(plans.options, bound, plans.required, one_way=True))
    return found


def _of_one_way(problem: Problem, usable: Flags) -> Iterator[Flags]:
    """Yields the options of each sharding type, if every table has one.

    Column-wise sharding counts as one way for EmbeddingBagCollections and as another one for
    EmbeddingCollections.
    """
    ways = [
        (kind, kind == COLUMN_WISE and not problem.tables[option.table].pooled)
        for option in problem.options
        for kind in [option.sharding_type]
    ]
    for chosen in sorted(set(ways)):
        of_way = usable & np.array([way == chosen for way in ways])
        if np.maximum.reduceat(of_way, problem.first_options).all():
            yield of_way


def _worth_improving(
    starts: list[tuple[float, Placement, OptionSet]], large: bool
) -> list[tuple[Placement, OptionSet]]:
    """Returns the best of all first plans; if the problem is not large, also the best of each
    way."""
    ordered = [entry[1:] for entry in sorted(starts, key=lambda entry: entry[0])]
    if large:
        return ordered[:_STARTS_OF_LARGE]
    chosen = ordered[:_STARTS]
    ways = {id(options): options for _, options in ordered if options.one_way}
    for way in ways.values():
        of_way = [entry for entry in ordered if entry[1] is way][:_STARTS]
        chosen += [entry for entry in of_way if not any(entry is each for each in chosen)]
    return chosen


def _starts(
    problem: Problem,
    programme: Programme,
    options: OptionSet,
    capacity: NDArray[np.float64],
    most: int,
) -> tuple[list[Placement], list[tuple[Placement, list[int]]]]:
    """Returns up to `most` first plans of a set, and the plans that the memory had no room for."""
    phases = max(options.bound - float(problem.charges[options.pairs].sum()), 0.0)
    starts: list[Placement] = []
    unfinished: list[tuple[Placement, list[int]]] = []
    for price in _PRICES:
        per_byte = price * phases / max(float(capacity.mean()), 1.0)
        choices = {
            chosen.tobytes(): chosen
            for share in _SHARES
            for chosen in [choose_options(problem, options.allowed, share * phases, per_byte)]
        }
        in_order = sorted(choices.values(), key=lambda chosen: at_best(problem, chosen))
        if price == 0:
            relaxed = relaxed_choice(programme, problem, options.allowed, options.pairs)
            in_order = in_order if relaxed is None else [relaxed, *in_order]
        for chosen in in_order:
            placement, left = place(problem, chosen, capacity, per_byte)
            if left:
                unfinished.append((placement, chosen[left].tolist()))
            else:
                starts.append(placement)
                if len(starts) == most:
                    break
        if starts:
            break
    return starts, unfinished

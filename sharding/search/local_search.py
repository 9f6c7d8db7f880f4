"""Improves a plan step by step: exchanges of shards between ranks, other options for tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..problem.options import ANY_RANKS, ONE_HOST
from .placement import Placement, choose_ranks

# With at least so many shards the search tries only exchanges with the least loaded ranks.
_MANY_SHARDS = 1000
_PARTNERS = 32
# At first many ranks near the slowest one count; later more and more only the slowest.
_SQUARINGS = (4, 5, 6)
_STEPS = 1500
_POLISHES = 3
# Numbers of ranks that are tried, slowest first, before the search gives up. One is for exchanges,
# one for other options of everything on a rank, which takes forty times as long.
_PATIENCE, _PATIENCE_FOR_OPTIONS = 20, 2


def improve(placement: Placement, allowed: NDArray[np.bool_], goal: float) -> Placement:
    """Returns the best plan on a path of steps that each lower the penalty.

    Args:
        placement: complete plan, which the search changes.
        allowed: (options), whether each may be used.
        goal: microseconds at which to stop.
    """
    best = placement.copy()
    for squarings in _SQUARINGS:
        placement = best.copy()
        placement.squarings = squarings
        # A phase must count for what it takes: its slowest rank, which may be far above the mean.
        placement.rescale()
        least, shards = best.cost, _Shards(placement)
        for _ in range(_STEPS):
            if least <= goal or not _step(placement, allowed, shards):
                break
            if (cost := placement.cost) < least:
                least, best = cost, placement.copy()
    best.settle()
    return best


def polish(placement: Placement, allowed: NDArray[np.bool_]) -> None:
    """Gives tables other options, or ranks, as long as that lowers a plan's cost."""
    ends = np.append(placement.problem.first_options, len(placement.problem.options))
    for _ in range(_POLISHES):
        before = placement.cost
        for table in range(len(placement.problem.tables)):
            least, best = placement.cost, placement.take(table)
            for option in ends[table] + np.flatnonzero(allowed[ends[table] : ends[table + 1]]):
                ranks, _ = placement.best_ranks(int(option))
                if ranks is None:
                    continue
                placement.put(int(option), ranks)
                if placement.cost < least * (1 - 1e-9):
                    least, best = placement.cost, (int(option), ranks)
                placement.take(table)
            placement.put(*best)
        if placement.cost >= before * (1 - 1e-6):
            break
    placement.settle()


def _step(placement: Placement, allowed: NDArray[np.bool_], shards: _Shards) -> bool:
    """Makes the best change that takes load off one of the slowest ranks; False if none does."""
    penalties = placement.penalty(placement.loads)
    enough = -1e-9 * float(penalties.sum())
    slowest = np.argsort(-penalties, kind="stable")[:_PATIENCE].tolist()
    for rank in slowest:
        exchange = _best_exchange(placement, shards, rank, penalties)
        if exchange.gain < enough:
            _exchange(placement, shards, exchange)
            return True
    for rank in slowest[:_PATIENCE_FOR_OPTIONS]:
        tables = np.flatnonzero(placement.holds[:, rank])
        if not tables.size:
            break
        other = _best_option(placement, allowed, tables, penalties)
        if other.gain < enough:
            placement.take(other.table)
            placement.put(other.option, other.ranks)
            shards.list_anew(placement)
            return True
    return False


class _Shards:
    """The shards of a placement that may be on any rank, table after table.

    Args:
        placement: complete plan.

    Attributes:
        table: (shards).
        rank: (shards).
        option: (shards).
        index: (shards), number of the shard within its table.
    """

    def __init__(self, placement: Placement) -> None:
        self.list_anew(placement)

    def list_anew(self, placement: Placement) -> None:
        """Makes this the shards of a placement, some of whose tables have other options."""
        spreads = placement.problem.option_spread[placement.option]
        tables = np.flatnonzero(spreads == ANY_RANKS)
        counts = placement.problem.option_shards[placement.option[tables]]
        none = np.empty(0, np.intp)
        self.table = np.repeat(tables, counts)
        self.rank = np.concatenate([none, *(placement.ranks[each] for each in tables.tolist())])
        self.option = placement.option[self.table]
        self.index = np.arange(len(self.table)) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True)
class _Exchange:
    """Shard `mine` goes to `rank`; shard `theirs` comes back for it, unless `theirs` is -1."""

    gain: float
    mine: int = -1
    theirs: int = -1
    rank: int = -1


def _best_exchange(
    placement: Placement, shards: _Shards, rank: int, penalties: NDArray[np.float64]
) -> _Exchange:
    problem = placement.problem
    mine = np.flatnonzero(shards.rank == rank)
    if not mine.size or problem.job.ranks == 1:
        return _Exchange(np.inf)
    partners = np.argsort(penalties, kind="stable")
    if len(shards.table) > _MANY_SHARDS:
        partners = partners[:_PARTNERS]
    partners = partners[partners != rank]
    is_partner = np.zeros(problem.job.ranks, bool)
    is_partner[partners] = True
    theirs = np.flatnonzero(is_partner[shards.rank])

    # One column for each partner if the shard goes there alone, then one for each exchange.
    to = np.concatenate([partners, shards.rank[theirs]])
    back_cost = np.zeros((len(problem.imbalance), len(to)))
    back_cost[:, len(partners) :] = problem.costs[shards.option[theirs]].T
    back_memory = np.zeros(len(to))
    back_memory[len(partners) :] = problem.memory[shards.option[theirs]]
    moved_cost = problem.costs[shards.option[mine]].T[:, :, None]
    moved_memory = problem.memory[shards.option[mine]][:, None]

    change = moved_cost - back_cost[:, None, :]
    gain = placement.penalty(placement.loads[:, rank, None, None] - change)
    gain += placement.penalty(placement.loads[:, to][:, None, :] + change)
    gain -= penalties[rank] + penalties[to]
    more = moved_memory - back_memory
    impossible = placement.memory[to] + more > placement.capacity[to]
    impossible |= placement.memory[rank] - more > placement.capacity[rank]
    impossible |= placement.holds[shards.table[mine]][:, to]
    impossible[:, len(partners) :] |= placement.holds[shards.table[theirs], rank]
    gain[impossible] = np.inf
    row, column = np.unravel_index(int(gain.argmin()), gain.shape)
    back = int(column) - len(partners)
    return _Exchange(
        float(gain[row, column]),
        int(mine[row]),
        int(theirs[back]) if back >= 0 else -1,
        int(to[column]),
    )


def _exchange(placement: Placement, shards: _Shards, exchange: _Exchange) -> None:
    rank = int(shards.rank[exchange.mine])
    for shard, to in ((exchange.mine, exchange.rank), (exchange.theirs, rank)):
        if shard < 0:
            continue
        option, ranks = placement.take(int(shards.table[shard]))
        ranks = ranks.copy()
        ranks[shards.index[shard]] = shards.rank[shard] = to
        placement.put(option, ranks)


@dataclass(frozen=True)
class _Replacement:
    """A table gets `option`, with its shards on `ranks`."""

    gain: float
    table: int
    option: int
    ranks: NDArray[np.intp]


def _best_option(
    placement: Placement,
    allowed: NDArray[np.bool_],
    tables: NDArray[np.intp],
    penalties: NDArray[np.float64],
) -> _Replacement:
    """Returns the best new option, or new ranks, of one of `tables`."""
    problem = placement.problem
    # Loads of the ranks without the table, one row a table.
    loads = np.repeat(placement.loads[:, None, :], len(tables), axis=1)
    memory = np.repeat(placement.memory[None, :], len(tables), axis=0)
    for row, table in enumerate(tables):
        ranks, option = placement.ranks[table], placement.option[table]
        loads[:, row, ranks] -= problem.costs[option][:, None]
        memory[row, ranks] -= problem.memory[option]
    without = placement.penalty(loads)
    lost = penalties.sum() - without.sum(axis=1)

    is_of = allowed & np.isin(problem.option_table, tables)
    options = np.flatnonzero(is_of)
    row_of = np.searchsorted(tables, problem.option_table[options])
    added = placement.penalty(loads[:, row_of] + problem.costs[options].T[:, :, None])
    added -= without[row_of]
    added[memory[row_of] + problem.memory[options][:, None] > placement.capacity] = np.inf
    gains = _least_added(placement, options, added) - lost[row_of]
    best = int(gains.argmin())
    option = int(options[best])
    ranks = choose_ranks(problem, option, added[best])
    return _Replacement(float(gains[best]), int(tables[row_of[best]]), option, ranks)


def _least_added(
    placement: Placement, options: NDArray[np.intp], added: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns what each option adds to the penalty on its best ranks. `added` is for each rank."""
    problem = placement.problem
    spread = problem.option_spread[options]
    on_cheapest = np.cumsum(np.sort(added, axis=1), axis=1)
    any_ranks = on_cheapest[np.arange(len(options)), problem.option_shards[options] - 1]
    per_host = added.reshape(len(options), -1, problem.job.host_ranks).sum(axis=2)
    result: NDArray[np.float64] = np.select(
        [spread == ANY_RANKS, spread == ONE_HOST],
        [any_ranks, per_host.min(axis=1)],
        added.sum(axis=1),
    )
    return result

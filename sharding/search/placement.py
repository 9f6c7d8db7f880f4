"""A plan in the making: the option of each table and the ranks of its shards."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..problem.options import ALL_RANKS, ONE_HOST, Problem


def choose_ranks(problem: Problem, option: int, added: NDArray[np.float64]) -> NDArray[np.intp]:
    """Returns the ranks where the shards of `option` add least, by what each rank would add."""
    chosen, host_ranks = problem.options[option], problem.job.host_ranks
    if chosen.spread == ALL_RANKS:
        return np.arange(problem.job.ranks)
    if chosen.spread == ONE_HOST:
        host = int(added.reshape(-1, host_ranks).sum(axis=1).argmin())
        return np.arange(host * host_ranks, (host + 1) * host_ranks)
    if chosen.shards == 1:
        return np.array([added.argmin()])
    return np.argsort(added, kind="stable")[: chosen.shards]


class Placement:
    """The loads of the ranks under the shards placed so far.

    Args:
        problem: what is planned.
        capacity: (ranks), bytes.
        scale: (phases), microseconds of a rank's load if all ranks were equal.

    Attributes:
        squarings: number of squarings of a load in the penalty, which is a stand-in for "the
            slowest rank". With it the second slowest rank matters, too.
        loads: (phases, ranks), microseconds, without the constants of ops.
        shared: (phases), microseconds that the shards add to the part that all ranks share.
        shards_of_op: (ops, ranks), number of shards.
        memory: (ranks), bytes.
        option: (tables), index of the option of each table, -1 where it is not placed.
        ranks: ranks of the shards of each table, in the order of the shards.
        holds: (tables, ranks), whether a rank has shards of a table.
    """

    def __init__(
        self, problem: Problem, capacity: NDArray[np.float64], scale: NDArray[np.float64]
    ) -> None:
        self.problem = problem
        self.capacity = capacity
        self.squarings = 4
        self.scale = np.maximum(scale, 1e-9)[:, None]
        ranks = problem.job.ranks
        self.loads = np.zeros((len(problem.imbalance), ranks))
        self.shared = np.zeros(len(problem.imbalance))
        self.shards_of_op = np.zeros((len(problem.op_pair), ranks), np.intp)
        self.memory = np.zeros(ranks)
        self.option = np.full(len(problem.tables), -1)
        self.ranks: list[NDArray[np.intp]] = [np.empty(0, np.intp) for _ in problem.tables]
        self.holds = np.zeros((len(problem.tables), ranks), bool)

    def copy(self) -> Placement:
        """Returns a copy: changes to it do not change this one."""
        other = Placement(self.problem, self.capacity, self.scale[:, 0])
        other.squarings = self.squarings
        other.loads, other.memory = self.loads.copy(), self.memory.copy()
        other.shared, other.shards_of_op = self.shared.copy(), self.shards_of_op.copy()
        other.option, other.ranks = self.option.copy(), list(self.ranks)
        other.holds = self.holds.copy()
        return other

    def rescale(self) -> None:
        """Makes the penalty count a phase by the load of its slowest rank, not of the mean one."""
        self.scale = np.maximum(self.loads.max(axis=1), 1e-9)[:, None]

    @property
    def cost(self) -> float:
        """Returns the objective (options.Problem), microseconds."""
        problem = self.problem
        used = self.shards_of_op > 0
        ops = problem.op_us.T @ used
        largest = (self.loads + ops).max(axis=1)
        shared = self.shared + problem.job.ranks_per_core * ops.sum(axis=1)
        pairs = list(set(problem.op_pair[used.any(axis=1)].tolist()))
        phases = problem.time(largest, shared / problem.job.ranks)
        return float(phases.sum() + problem.charges[pairs].sum())

    def penalty(self, loads: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the penalty of each rank's loads, (phases, ...).

        In the shared part of a phase a load counts alike on each rank: by as much as the power of a
        balanced load grows with it.
        """
        imbalance = self.problem.imbalance
        flat = loads.reshape(len(self.scale), -1)
        power = flat / self.scale
        for _ in range(self.squarings):
            power *= power
        result = (imbalance * self.scale[:, 0]) @ power
        if imbalance.min() < 1:
            result += (1 - imbalance) * 2**self.squarings @ flat
        return np.asarray(result.reshape(loads.shape[1:]))

    def best_ranks(self, option: int) -> tuple[NDArray[np.intp] | None, float]:
        """Returns where the shards of `option` would go, and how much that adds to the penalty.

        If the memory has no room for them, it returns None and infinity.
        """
        cost, memory = self.problem.costs[option], self.problem.memory[option]
        added = self.penalty(self.loads + cost[:, None]) - self.penalty(self.loads)
        added[self.memory + memory > self.capacity] = np.inf
        ranks = choose_ranks(self.problem, option, added)
        total = float(added[ranks].sum())
        return (ranks, total) if np.isfinite(total) else (None, np.inf)

    def put(self, option: int, ranks: NDArray[np.intp]) -> None:
        """Places a table that is not placed."""
        table = self.problem.options[option].table
        self.option[table], self.ranks[table] = option, ranks
        self._add(option, ranks, 1)

    def take(self, table: int) -> tuple[int, NDArray[np.intp]]:
        """Removes a placed table, and returns what `put` needs to bring it back."""
        option, ranks = int(self.option[table]), self.ranks[table]
        self._add(option, ranks, -1)
        self.option[table] = -1
        return option, ranks

    def settle(self) -> None:
        """Sums up the loads anew, to remove the rounding errors of all changes."""
        self.loads[:], self.memory[:], self.shared[:], self.shards_of_op[:] = 0.0, 0.0, 0.0, 0
        for option, ranks in zip(self.option.tolist(), self.ranks, strict=True):
            self._add(option, ranks, 1)

    def _add(self, option: int, ranks: NDArray[np.intp], times: int) -> None:
        problem = self.problem
        self.loads[:, ranks] += times * problem.costs[option][:, None]
        self.shared += times * len(ranks) * problem.shared[option]
        self.shards_of_op[problem.option_op[option], ranks] += times
        self.memory[ranks] += times * problem.memory[option]
        self.holds[problem.option_table[option], ranks] = times > 0

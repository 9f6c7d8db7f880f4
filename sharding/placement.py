"""A plan that is being made: which option each table has and where its shards are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .options import ALL_RANKS, ONE_HOST, Problem


def choose_ranks(problem: Problem, option: int, added: NDArray[np.float64]) -> NDArray[np.intp]:
    """Returns the ranks for the shards of `option` that add least, from what each rank adds."""
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
        scale: (phases), microseconds, what a rank's load would be if all were equal.

    Attributes:
        squarings: a load counts by its power of 2**squarings, a stand-in for "the slowest rank" by
            which the second slowest matters, too.
        loads: (phases, ranks), microseconds.
        memory: (ranks), bytes.
        option: (tables), index of the option of each table, -1 where it is not placed.
        ranks: of the shards of each table, in the order of the shards.
    """

    def __init__(
        self, problem: Problem, capacity: NDArray[np.float64], scale: NDArray[np.float64]
    ) -> None:
        self.problem = problem
        self.capacity = capacity
        self.squarings = 4
        self.scale = np.maximum(scale, 1e-9)[:, None]
        ranks = problem.job.ranks
        self.loads = np.zeros((len(problem.phases), ranks))
        self.memory = np.zeros(ranks)
        self.option = np.full(len(problem.tables), -1)
        self.ranks: list[NDArray[np.intp]] = [np.empty(0, np.intp) for _ in problem.tables]

    def copy(self) -> Placement:
        """Returns a placement that can be changed apart from this one."""
        other = Placement(self.problem, self.capacity, self.scale[:, 0])
        other.squarings = self.squarings
        other.loads, other.memory = self.loads.copy(), self.memory.copy()
        other.option, other.ranks = self.option.copy(), list(self.ranks)
        return other

    @property
    def objective(self) -> float:
        """Sum of the phases (options.Problem), microseconds, without charges."""
        crowded = self.loads.mean(axis=1) * self.problem.crowding
        return float(np.maximum(self.loads.max(axis=1), crowded).sum())

    @property
    def cost(self) -> float:
        """The objective with the charges of all pairs of a module and a group in use."""
        problem = self.problem
        used = problem.module_groups[self.option[self.option >= 0]]
        return self.objective + problem.charge * len(np.unique(used))

    def penalty(self, loads: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns what each rank's loads, (phases, ...), count for in the search."""
        power = loads.reshape(len(self.scale), -1) / self.scale
        for _ in range(self.squarings):
            power *= power
        result: NDArray[np.float64] = (self.scale[:, 0] @ power).reshape(loads.shape[1:])
        return result

    def best_ranks(self, option: int) -> tuple[NDArray[np.intp] | None, float]:
        """Returns where the shards of `option` would go, and what that adds to the penalty.

        None and infinity where the memory has no room for them.
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
        self.loads[:, ranks] += self.problem.costs[option][:, None]
        self.memory[ranks] += self.problem.memory[option]

    def take(self, table: int) -> tuple[int, NDArray[np.intp]]:
        """Removes a placed table, and returns what `put` needs to bring it back."""
        option, ranks = int(self.option[table]), self.ranks[table]
        self.loads[:, ranks] -= self.problem.costs[option][:, None]
        self.memory[ranks] -= self.problem.memory[option]
        self.option[table] = -1
        return option, ranks

    def settle(self) -> None:
        """Sums the loads up anew, without the rounding of what was put and taken."""
        self.loads[:], self.memory[:] = 0.0, 0.0
        for option, ranks in zip(self.option, self.ranks, strict=True):
            self.loads[:, ranks] += self.problem.costs[option][:, None]
            self.memory[ranks] += self.problem.memory[option]

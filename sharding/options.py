"""The ways of sharding each table, as the arrays that the search and the lower bound work on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .estimates import AdditiveCosts, Estimate, LookupWork
from .exchange_costs import exchange_costs
from .job import Job
from .tables import (
    COLUMN_WISE,
    ROW_WISE,
    TABLE_ROW_WISE,
    TABLE_WISE,
    PlacedShard,
    PlacedTable,
    Table,
    Workload,
)
from .traffic import ShardTraffic, result_bytes, shard_traffic

# Where the shards of an option go.
ANY_RANKS, ONE_HOST, ALL_RANKS = range(3)

# Phases in which ranks need a core of their own.
COMPUTE = ("forward", "backward")


@dataclass(frozen=True)
class Option:
    """A way of sharding a table: `shards` equal shards.

    Attributes:
        table: index in the workload.
        sharding_type: one of tables.SHARDING_TYPES.
        rows: of each shard; of the last one possibly fewer.
        columns: of each shard.
        shards: how many.
        group: tables of one module and group share exchanges and a lookup op.
        spread: ANY_RANKS (different ones), ONE_HOST (all its ranks) or ALL_RANKS.
    """

    table: int
    sharding_type: str
    rows: int
    columns: int
    shards: int
    group: str
    spread: int

    def placed(self, table: Table, ranks: Sequence[int]) -> PlacedTable:
        """Returns `table` sharded this way, with a rank for each shard."""
        by_column = self.sharding_type == COLUMN_WISE
        shards = []
        for index, rank in enumerate(ranks):
            row_offset = 0 if by_column else index * self.rows
            shards.append(
                PlacedShard(
                    rank=rank,
                    rows=min(self.rows, table.rows - row_offset),
                    columns=self.columns,
                    row_offset=row_offset,
                    column_offset=index * self.columns if by_column else 0,
                )
            )
        return PlacedTable(table, self.sharding_type, tuple(shards))


@dataclass(frozen=True)
class Problem:
    """The search's problem: one option for each table and ranks for its shards.

    The objective, in microseconds: the sum over phases of the largest rank's load, or of the mean
    load times the phase's `crowding` where that is more, plus `charge` for each pair of a module
    and a group in use.

    Attributes:
        job: what the plan is for.
        tables: of the workload.
        options: those of a table are neighbours, tables in order.
        traffic: of a shard of each option.
        costs: (options, phases), microseconds that a shard adds to its rank.
        phases: names of the phases.
        crowding: (phases), how many ranks share what the phase needs.
        memory: (options), bytes that a shard adds to its rank.
        charge: microseconds of a module's constant costs per group, where all ranks have shards.
        least_charge: the same where one rank has all of them.
        fixed_bytes: what every rank keeps whatever the plan.
    """

    job: Job
    tables: Sequence[Table]
    options: Sequence[Option]
    traffic: Sequence[ShardTraffic]
    costs: NDArray[np.float64]
    phases: tuple[str, ...]
    crowding: NDArray[np.float64]
    memory: NDArray[np.float64]
    charge: float
    least_charge: float
    fixed_bytes: float

    @cached_property
    def option_table(self) -> NDArray[np.intp]:
        """Table of each option."""
        return np.array([option.table for option in self.options])

    @cached_property
    def module_groups(self) -> NDArray[np.intp]:
        """Number of the pair of a module and a group of each option."""
        pairs = [(self.tables[option.table].module, option.group) for option in self.options]
        numbers = {pair: number for number, pair in enumerate(sorted(set(pairs)))}
        return np.array([numbers[pair] for pair in pairs])

    @cached_property
    def option_shards(self) -> NDArray[np.intp]:
        """Number of shards of each option."""
        return np.array([option.shards for option in self.options])

    @cached_property
    def option_spread(self) -> NDArray[np.intp]:
        """ANY_RANKS, ONE_HOST or ALL_RANKS of each option."""
        return np.array([option.spread for option in self.options])

    @cached_property
    def first_options(self) -> NDArray[np.intp]:
        """Index of each table's first option."""
        return np.searchsorted(self.option_table, np.arange(len(self.tables)))


def options_of(index: int, table: Table, job: Job) -> list[Option]:
    """Returns the ways of sharding a table, the one with fewest shards of each type first."""
    options = []
    types = table.sharding_types
    if TABLE_WISE in types:
        options.append(Option(index, TABLE_WISE, table.rows, table.dim, 1, TABLE_WISE, ANY_RANKS))
    if COLUMN_WISE in types:
        for columns in _column_widths(table, job.ranks):
            shards = table.dim // columns
            # TorchRec's EmbeddingCollection takes one width for all its column-wise tables.
            group = COLUMN_WISE if table.pooled else f"{COLUMN_WISE} / {shards}"
            options.append(
                Option(index, COLUMN_WISE, table.rows, columns, shards, group, ANY_RANKS)
            )
    for sharding_type, ranks, spread in (
        (TABLE_ROW_WISE, job.host_ranks, ONE_HOST),
        (ROW_WISE, job.ranks, ALL_RANKS),
    ):
        rows = -(-table.rows // ranks)
        # TorchRec's blocks are rounded up: of 5 rows on 4 ranks the last one has none.
        if sharding_type in types and rows * (ranks - 1) < table.rows:
            options.append(
                Option(index, sharding_type, rows, table.dim, ranks, sharding_type, spread)
            )
    return options


def _column_widths(table: Table, ranks: int) -> list[int]:
    """Returns the widths of column-wise shards, the whole table first: multiples of 4 columns."""
    widths = [table.dim]
    for shards in range(2, ranks + 1):
        width = table.dim // shards
        if width < table.min_columns:
            break
        if table.dim % shards == 0 and width % 4 == 0:
            widths.append(width)
    return widths


def make_problem(workload: Workload, job: Job, model: AdditiveCosts) -> Problem:
    """Returns the search's problem of planning `workload` for `job` at the costs of `model`.

    Raises:
        ValueError: a table has no option at all.
    """
    options: list[Option] = []
    for index, table in enumerate(workload.tables):
        its_options = options_of(index, table, job)
        if not its_options:
            raise ValueError(
                f"table '{table.name}' of {table.rows} rows can't be sharded "
                f"{' or '.join(table.sharding_types)} over {job.ranks} ranks: fewer rows than "
                "ranks leave shards empty. Allow another sharding type"
            )
        options.extend(its_options)
    traffic = [
        shard_traffic(
            workload.tables[option.table],
            workload.reuse_of(workload.tables[option.table]),
            job,
            option.rows,
            option.columns,
        )
        for option in options
    ]
    costs, phases, exchanges, ops = _costs(options, traffic, job, model)
    return Problem(
        job=job,
        tables=workload.tables,
        options=options,
        traffic=traffic,
        costs=costs,
        phases=phases,
        crowding=np.array([job.ranks_per_core if name in COMPUTE else 1.0 for name in phases]),
        memory=np.array([shard.held_bytes for shard in traffic]),
        charge=exchanges + ops * job.ranks_per_core,
        least_charge=exchanges + ops,
        fixed_bytes=sum(
            result_bytes(table, workload.reuse_of(table), job) for table in workload.tables
        ),
    )


def _costs(
    options: Sequence[Option], traffic: Sequence[ShardTraffic], job: Job, model: AdditiveCosts
) -> tuple[NDArray[np.float64], tuple[str, ...], float, float]:
    """Returns costs and names of the phases, and the constants of exchanges and of ops."""
    works = [shard.lookup for shard in traffic]
    ids = np.array([shard.ids_per_rank for shard in traffic]) * job.ranks
    rows = np.array([shard.rows_per_rank for shard in traffic]) * job.ranks
    cheapest = _first_of_each_table(options)
    ids_line = exchange_costs(model, job, ids[cheapest].sum() / job.ranks)
    rows_line = exchange_costs(model, job, rows[cheapest].sum() / job.ranks)
    phases = {
        "ids": ids * ids_line.per_byte,
        "forward": np.asarray(model.marginal_forward(works)),
        "embeddings": rows * rows_line.per_byte,
    }
    exchanges = ids_line.constant + rows_line.constant
    ops = _op_constant(works, phases["forward"], model.lookup_forward)
    if job.training:
        backward = np.asarray(model.marginal_backward(works))
        # Gradients go the same way back, so that the slowest rank of both exchanges is the same.
        phases["embeddings"] = 2 * phases["embeddings"]
        phases["backward"] = backward
        exchanges += rows_line.constant
        ops += _op_constant(works, backward, model.lookup_backward)
    if job.bound > 0:
        # Nobody waits for the slowest of a phase any more, only for the slowest of all of them.
        phases = {"all": np.sum(list(phases.values()), axis=0)}
    costs = np.maximum(np.stack(list(phases.values()), axis=1), 0.0)
    return costs, tuple(phases), exchanges, ops


def _first_of_each_table(options: Sequence[Option]) -> list[int]:
    return [
        index
        for index, option in enumerate(options)
        if index == 0 or options[index - 1].table != option.table
    ]


def _op_constant(
    works: Sequence[LookupWork],
    marginal: NDArray[np.float64],
    whole: Callable[[Sequence[LookupWork]], Estimate],
) -> float:
    """Returns what an op costs beyond its shards, read off the smallest of them."""
    smallest = int(np.argmin(marginal))
    return max(whole([works[smallest]]).microseconds - float(marginal[smallest]), 0.0)

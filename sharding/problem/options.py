"""The ways of sharding each table, as the arrays that the search and the lower bound work on."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..cost_interface import AdditiveCosts, Ops
from .collectives import way_of
from .exchange_costs import exchanges_of
from .job import Job
from .shard_costs import phases_of
from .shard_traffic import ShardTraffic, result_bytes, shard_traffic
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

# Where the shards of an option go.
ANY_RANKS, ONE_HOST, ALL_RANKS = range(3)


@dataclass(frozen=True)
class Option:
    """A way of sharding a table into `shards` equal shards.

    Attributes:
        table: index in the workload.
        sharding_type: one of tables.SHARDING_TYPES.
        rows: rows of each shard; the last one may have fewer.
        columns: columns of each shard.
        shards: number of shards.
        group: name of a group; tables of one module and group share exchanges and a lookup op.
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
    """The search's problem: to choose one option for each table, and ranks for its shards.

    The objective, in microseconds, is that of rating.rate. It is the sum of the `charges` of each
    pair of a module and a group in use, and of a time for each phase,
        shared ** (1 - imbalance) * max(largest, shared) ** imbalance

    `largest` is the load of the rank with most, `shared` is the mean over ranks of what they share.
    A rank's load is the sum of the `costs` of its shards, and of `op_us` of each op that it has
    shards in. A shard adds its `shared` to what ranks share. An op adds `op_us` times the ranks
    that share a core.

    Attributes:
        job: job that the plan is for.
        tables: tables of the workload.
        options: options of all tables; a table's are neighbours, and tables are in order.
        traffic: traffic of a shard of each option.
        costs: (options, phases), microseconds that a shard adds to its rank.
        shared: (options, phases), microseconds that a shard adds to what all ranks share.
        imbalance: (phases), 0 where only the shared part counts, 1 where only the largest rank
            does.
        op_us: (ops, phases), microseconds of a lookup op before any shard.
        option_op: (options), the op of the option's shards.
        op_pair: (ops), number of the op's pair of a module and a group.
        memory: (options), bytes that a shard adds to its rank.
        charges: (pairs), microseconds of a pair's exchanges that don't depend on their bytes.
        fixed_bytes: bytes that every rank keeps under any plan.
    """

    job: Job
    tables: Sequence[Table]
    options: Sequence[Option]
    traffic: Sequence[ShardTraffic]
    costs: NDArray[np.float64]
    shared: NDArray[np.float64]
    imbalance: NDArray[np.float64]
    op_us: NDArray[np.float64]
    option_op: NDArray[np.intp]
    op_pair: NDArray[np.intp]
    memory: NDArray[np.float64]
    charges: NDArray[np.float64]
    fixed_bytes: float

    def time(
        self, largest: NDArray[np.float64], shared: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Returns the microseconds of the phases, (..., phases) as both arguments have it."""
        at_least = np.maximum(shared, 0.0)
        times: NDArray[np.float64] = (
            at_least ** (1 - self.imbalance) * np.maximum(largest, at_least) ** self.imbalance
        )
        return times

    @cached_property
    def option_table(self) -> NDArray[np.intp]:
        """Returns the table of each option."""
        return np.array([option.table for option in self.options])

    @cached_property
    def option_shards(self) -> NDArray[np.intp]:
        """Returns the number of shards of each option."""
        return np.array([option.shards for option in self.options])

    @cached_property
    def option_spread(self) -> NDArray[np.intp]:
        """Returns ANY_RANKS, ONE_HOST or ALL_RANKS for each option."""
        return np.array([option.spread for option in self.options])

    @cached_property
    def collection_widths(self) -> list[list[NDArray[np.bool_]]]:
        """Returns for each EmbeddingCollection, by width, which options are its column-wise ones.

        TorchRec has one width for all column-wise tables of a collection.
        """
        groups: dict[str, dict[str, NDArray[np.bool_]]] = {}
        for number, option in enumerate(self.options):
            table = self.tables[option.table]
            if option.sharding_type == COLUMN_WISE and not table.pooled:
                widths = groups.setdefault(table.module, {})
                of_width = widths.setdefault(option.group, np.zeros(len(self.options), bool))
                of_width[number] = True
        return [list(widths.values()) for widths in groups.values()]

    @cached_property
    def first_options(self) -> NDArray[np.intp]:
        """Returns the index of each table's first option."""
        return np.searchsorted(self.option_table, np.arange(len(self.tables)))


class NoOptionError(ValueError):
    """A table can't be sharded in any of the ways that are left to it."""


def options_of(index: int, table: Table, job: Job) -> list[Option]:
    """Returns the ways of sharding a table. Of each type the one with fewest shards comes first."""
    options = []
    types = table.sharding_types
    if TABLE_WISE in types:
        options.append(Option(index, TABLE_WISE, table.rows, table.dim, 1, TABLE_WISE, ANY_RANKS))
    if COLUMN_WISE in types:
        for columns in _column_widths(table, job.ranks):
            shards = table.dim // columns
            # Problem.collection_widths goes by these.
            group = COLUMN_WISE if table.pooled else f"{COLUMN_WISE} / {shards}"
            options.append(
                Option(index, COLUMN_WISE, table.rows, columns, shards, group, ANY_RANKS)
            )
    for sharding_type, ranks, spread in (
        (TABLE_ROW_WISE, job.host_ranks, ONE_HOST),
        (ROW_WISE, job.ranks, ALL_RANKS),
    ):
        rows = -(-table.rows // ranks)
        # TorchRec rounds blocks up: 5 rows on 4 ranks leave the last rank none.
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
        NoOptionError: a table has no option at all.
    """
    options: list[Option] = []
    for index, table in enumerate(workload.tables):
        its_options = options_of(index, table, job)
        if not its_options:
            raise NoOptionError(
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
            option.sharding_type,
            option.rows,
            option.columns,
        )
        for option in options
    ]
    pairs = _numbers((workload.tables[option.table].module, option.group) for option in options)
    ops = _numbers(
        (pair, workload.tables[option.table].weight_bytes)
        for pair, option in zip(pairs.tolist(), options, strict=True)
    )
    first_of_op = np.unique(ops, return_index=True)[1]
    exchanges = exchanges_of(workload, job, model)
    ways = [
        way_of(job, option.sharding_type, workload.tables[option.table].pooled)
        for option in options
    ]
    # Costs as if all tables of an op had this sharding type, and ranks had equally many shards.
    shards_per_rank = np.array([option.shards / job.ranks for option in options])
    phases = phases_of(traffic, ways, Ops(ops, shards_per_rank), job, model, exchanges)
    return Problem(
        job=job,
        tables=workload.tables,
        options=options,
        traffic=traffic,
        costs=np.stack([phase.costs for phase in phases], axis=1),
        shared=np.stack([phase.shared for phase in phases], axis=1),
        imbalance=np.array([phase.imbalance for phase in phases]),
        op_us=np.stack([phase.op_us for phase in phases], axis=1),
        option_op=ops,
        op_pair=pairs[first_of_op],
        memory=np.array([shard.held_bytes for shard in traffic]),
        charges=np.array(
            [exchanges.constant(ways[first]) for first in np.unique(pairs, return_index=True)[1]]
        ),
        fixed_bytes=sum(
            result_bytes(table, workload.reuse_of(table), job) for table in workload.tables
        ),
    )


def _numbers(keys: Iterable[Hashable]) -> NDArray[np.intp]:
    """Returns a number for each key, the same for equal ones."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.intp)

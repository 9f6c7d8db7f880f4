"""Embedding tables as the planner sees them, the ways of sharding them, and placed shards."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..cost_interface import TableReuse

# The values of TorchRec's ShardingType that the planner chooses among.
TABLE_WISE = "table_wise"
COLUMN_WISE = "column_wise"
ROW_WISE = "row_wise"
TABLE_ROW_WISE = "table_row_wise"
SHARDING_TYPES = (TABLE_WISE, COLUMN_WISE, ROW_WISE, TABLE_ROW_WISE)

# TorchRec's word for tables in the memory of their rank's device.
KERNEL = "fused"

# A narrower column shard reads less than a cache line of a row.
DEFAULT_MIN_COLUMNS = 16


@dataclass(frozen=True)
class Table:
    """An embedding table and the ways in which it may be sharded.

    Attributes:
        name: name of the table, unique within its module.
        rows: number of rows.
        dim: number of columns.
        module: path of the module in the model.
        weight_bytes: bytes of one weight.
        features: number of features that are looked up in it.
        pooled: whether it is an EmbeddingBagCollection's.
        weighted: whether ids come with weights.
        optimizer_bytes_per_row: bytes of optimizer state of a row, whatever its columns.
        optimizer_bytes_per_weight: bytes of optimizer state of one weight.
        kernel: TorchRec's word for where the table lies and what reads it. Plans hand it on.
        sharding_types: sharding types that the sharder and the constraints allow.
        min_columns: least number of columns of a column-wise shard.
    """

    name: str
    rows: int
    dim: int
    module: str = ""
    weight_bytes: int = 4
    features: int = 1
    pooled: bool = True
    weighted: bool = False
    optimizer_bytes_per_row: int = 0
    optimizer_bytes_per_weight: int = 0
    kernel: str = KERNEL
    sharding_types: tuple[str, ...] = (TABLE_WISE, COLUMN_WISE, ROW_WISE)
    min_columns: int = DEFAULT_MIN_COLUMNS

    def __post_init__(self) -> None:
        """Raises ValueError for values that are impossible."""
        for what in ("rows", "dim", "weight_bytes", "features", "min_columns"):
            if getattr(self, what) < 1:
                raise ValueError(f"table '{self.name}': {what} is {getattr(self, what)}")
        unknown = [name for name in self.sharding_types if name not in SHARDING_TYPES]
        if unknown or not self.sharding_types:
            raise ValueError(
                f"table '{self.name}': sharding types {list(self.sharding_types)}, but the planner "
                f"chooses among {', '.join(SHARDING_TYPES)}"
            )

    @property
    def path(self) -> str:
        """Returns the path of the table in the model."""
        return f"{self.module}.{self.name}" if self.module else self.name

    def weights_bytes(self, rows: int, columns: int) -> int:
        """Returns the bytes of the weights and the optimizer state of a shard."""
        per_row = self.optimizer_bytes_per_row
        return rows * (per_row + columns * (self.weight_bytes + self.optimizer_bytes_per_weight))


@dataclass(frozen=True)
class PlacedShard:
    """A block of a table on a rank.

    Attributes:
        rank: rank that holds the block.
        rows: number of rows.
        columns: number of columns.
        row_offset: first row.
        column_offset: first column.
    """

    rank: int
    rows: int
    columns: int
    row_offset: int = 0
    column_offset: int = 0


@dataclass(frozen=True)
class PlacedTable:
    """A table, how it is sharded and where its shards are."""

    table: Table
    sharding_type: str
    shards: tuple[PlacedShard, ...]


@dataclass(frozen=True)
class UniformReuse:
    """The assumed statistics of a table without any: `pooling_factor` ids, drawn uniformly."""

    rows: int
    pooling_factor: float = 1.0

    def unique_rows(self, samples: float) -> float:
        """Returns the expected number of distinct rows that `samples` samples read."""
        ids = samples * self.pooling_factor
        if self.rows == 1:
            return min(1.0, ids)
        return float(-self.rows * np.expm1(ids * np.log1p(-1.0 / self.rows)))


@dataclass(frozen=True)
class Workload:
    """The tables of a model, and the statistics of each.

    Attributes:
        tables: tables of the model.
        reuse: statistics by the table's path; the pooling factor counts the ids of all its
            features.
    """

    tables: Sequence[Table]
    reuse: Mapping[str, TableReuse] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError for no tables, two tables of one name, or impossible statistics."""
        if not self.tables:
            raise ValueError("there are no tables to plan for")
        names = [(table.module, table.name) for table in self.tables]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"these tables are there twice: {twice}")
        for table in self.tables:
            factor = self.reuse_of(table).pooling_factor
            if not (math.isfinite(factor) and factor >= 0):
                raise ValueError(f"table '{table.name}': its pooling factor is {factor}")

    def reuse_of(self, table: Table) -> TableReuse:
        """Returns the statistics of `table`, or UniformReuse where there are none."""
        return self.reuse.get(table.path) or UniformReuse(table.rows)

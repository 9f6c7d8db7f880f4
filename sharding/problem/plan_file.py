"""Plans as JSON files: which ranks hold which rows and columns of each table.

{"format": "torchrec-bls plan", "version": 1, "ranks": 4, "ranks_per_host": 2, "tables": [{"module":
"ebc", "name": "t0", "rows": 1000, "dim": 64, "sharding_type": "column_wise", "shards": [{"rank": 2,
"rows": 1000, "columns": 32, "row_offset": 0, "column_offset": 0}, ...]}, ...]}

Files of before lack "ranks_per_host".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from msgspec import Meta, structs

from torchrec_bls.records import Format, Positive, Record, Whole

from .tables import SHARDING_TYPES, TABLE_ROW_WISE, PlacedShard, PlacedTable, Table

FORMAT, VERSION = "torchrec-bls plan", 1


class PlanFileError(ValueError):
    """A file does not hold a plan, or holds a plan of other tables."""


@dataclass(frozen=True)
class SavedPlan:
    """The content of a plan's file.

    Attributes:
        ranks: world size.
        tables: tables with the rows and columns that they had when the plan was made; the file does
            not have the other fields of a Table.
        ranks_per_host: ranks that share a host; None: the file does not say it.
    """

    ranks: int
    tables: tuple[PlacedTable, ...]
    ranks_per_host: int | None = None

    def check_shape(self, ranks: int, ranks_per_host: int, source: str) -> None:
        """Checks that the plan is for these ranks and hosts.

        Args:
            ranks: world size.
            ranks_per_host: ranks that share a host.
            source: what messages call the plan.

        Raises:
            PlanFileError: the plan is for others.
        """
        if self.ranks != ranks:
            raise PlanFileError(
                f"{source} is a plan for {self.ranks} ranks, but there are {ranks}: plan again"
            )
        here = _shape(ranks, ranks_per_host)
        if self.ranks_per_host not in (None, ranks_per_host):
            there = _shape(self.ranks, self.ranks_per_host)
            raise PlanFileError(f"{source} is a plan for {there}, but there are {here}: plan again")
        for placed in self.tables:
            if placed.sharding_type == TABLE_ROW_WISE and not _fill_host(placed, ranks_per_host):
                on = sorted({shard.rank for shard in placed.shards})
                raise PlanFileError(
                    f"{source} has table '{placed.table.path}' in rows of one host, on ranks {on}, "
                    f"but there are {here}: plan again"
                )

    def of(self, tables: Sequence[Table], source: str) -> tuple[PlacedTable, ...]:
        """Returns the plan of `tables`, in their order.

        Args:
            tables: tables of a model.
            source: what messages call the plan.

        Raises:
            PlanFileError: the model has other tables.
        """
        saved = {placed.table.path: placed for placed in self.tables}
        known = {table.path for table in tables}
        unknown = sorted(saved.keys() - known)
        if unknown:
            raise PlanFileError(
                f"{source} plans table '{unknown[0]}' and {len(unknown) - 1} more that the model "
                "does not have: plan this model, or give the one that the plan is of"
            )
        placed = []
        for table in tables:
            found = saved.get(table.path)
            if found is None:
                raise PlanFileError(f"{source} says nothing of table '{table.path}': plan again")
            was = found.table
            if (was.rows, was.dim) != (table.rows, table.dim):
                raise PlanFileError(
                    f"{source} is of a table '{table.path}' of {was.rows} x {was.dim}, and the "
                    f"model's has {table.rows} x {table.dim}: plan again"
                )
            placed.append(PlacedTable(table, found.sharding_type, found.shards))
        return tuple(placed)


def save_plan(
    path: Path, plan: Iterable[PlacedTable], ranks: int, ranks_per_host: int | None
) -> None:
    """Writes a plan, a table on a line.

    Args:
        path: file to write.
        plan: the plan.
        ranks: world size.
        ranks_per_host: ranks that share a host; None: any number, since no table is split among the
            ranks of one host.

    Raises:
        OSError: the file can't be written.
    """
    lines = [
        json.dumps(
            {
                "module": placed.table.module,
                "name": placed.table.name,
                "rows": placed.table.rows,
                "dim": placed.table.dim,
                "sharding_type": placed.sharding_type,
                "shards": [asdict(shard) for shard in placed.shards],
            }
        )
        for placed in plan
    ]
    content = {"format": FORMAT, "version": VERSION, "ranks": ranks}
    if ranks_per_host is not None:
        content["ranks_per_host"] = ranks_per_host
    head = json.dumps(content)[:-1]
    path.write_text(head + ', "tables": [\n' + ",\n".join(lines) + "\n]}\n")


def read_plan(path: Path) -> SavedPlan:
    """Reads what `save_plan` wrote.

    Raises:
        PlanFileError: the file is no such file, is of another version, or has shards that do not
            make up the tables.
        OSError: it can't be read.
    """
    record = _FILE.read(path)
    tables = tuple(table.placed() for table in record.tables)
    return SavedPlan(record.ranks, tables, record.ranks_per_host)


class _ShardRecord(Record):
    rank: Whole
    rows: Whole
    columns: Whole
    row_offset: Whole
    column_offset: Whole


class _TableRecord(Record):
    module: str
    name: str
    rows: Positive
    dim: Positive
    sharding_type: str
    shards: list[_ShardRecord]

    def __post_init__(self) -> None:
        if self.sharding_type not in SHARDING_TYPES:
            known = ", ".join(SHARDING_TYPES)
            raise ValueError(f"sharding type {self.sharding_type!r} is none of {known}")
        placed = self.placed()
        _check_cover(placed.table, placed.shards)

    def placed(self) -> PlacedTable:
        shards = tuple(PlacedShard(**structs.asdict(shard)) for shard in self.shards)
        table = Table(self.name, self.rows, self.dim, self.module)
        return PlacedTable(table, self.sharding_type, shards)


class _PlanRecord(Record):
    format: str
    version: int
    ranks: Positive
    tables: Annotated[list[_TableRecord], Meta(min_length=1)]
    ranks_per_host: Positive | None = None

    def __post_init__(self) -> None:
        if self.ranks % (self.ranks_per_host or 1):
            raise ValueError(f"{self.ranks} ranks do not fill hosts of {self.ranks_per_host}")
        paths = [table.placed().table.path for table in self.tables]
        for path, table in zip(paths, self.tables, strict=True):
            beyond = [shard.rank for shard in table.shards if shard.rank >= self.ranks]
            if beyond:
                raise ValueError(
                    f"table '{path}' has a shard on rank {beyond[0]}, of {self.ranks} ranks"
                )
        if len(set(paths)) < len(paths):
            raise ValueError(f"it plans a table twice: {sorted(paths)}")


_FILE = Format(
    _PlanRecord,
    "plan again, and save it with `torchrec-bls plan --save` or sharding.save_plan",
    PlanFileError,
    FORMAT,
    (VERSION,),
)


def _shape(ranks: int, ranks_per_host: int | None) -> str:
    hosts = ranks // (ranks_per_host or ranks)
    return f"{hosts} host{'s' if hosts > 1 else ''} of {ranks_per_host} ranks"


def _fill_host(placed: PlacedTable, ranks_per_host: int) -> bool:
    """Returns whether the shards are blocks of rows, one for each rank of one host."""
    block = -(-placed.table.rows // ranks_per_host)
    # Blocks without rows are not in the file.
    blocks = -(-placed.table.rows // block)
    ranks = {shard.rank for shard in placed.shards}
    hosts = {rank // ranks_per_host for rank in ranks}
    return len(hosts) == 1 and len(ranks) == len(placed.shards) == blocks


def _check_cover(table: Table, shards: Sequence[PlacedShard]) -> None:
    """Raises ValueError unless each weight of the table is in exactly one shard."""
    inside = all(
        shard.row_offset + shard.rows <= table.rows
        and shard.column_offset + shard.columns <= table.dim
        for shard in shards
    )
    size = sum(shard.rows * shard.columns for shard in shards)
    in_order = sorted(shards, key=lambda shard: (shard.row_offset, shard.column_offset))
    # All shards of a plan are blocks of rows or of columns. So neighbours show overlaps.
    apart = all(
        before.row_offset + before.rows <= after.row_offset
        or before.column_offset + before.columns <= after.column_offset
        for before, after in pairwise(in_order)
    )
    if not (inside and apart and size == table.rows * table.dim):
        raise ValueError(
            f"shards of '{table.path}' do not make up its {table.rows} rows of {table.dim} columns"
        )

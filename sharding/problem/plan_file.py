"""Plans as JSON files: which ranks hold which rows and columns of each table.

{"format": "torchrec-bls plan", "version": 1, "ranks": 4, "tables": [{"module": "ebc", "name": "t0",
"rows": 1000, "dim": 64, "sharding_type": "column_wise", "shards": [{"rank": 2, "rows": 1000,
"columns": 32, "row_offset": 0, "column_offset": 0}, ...]}, ...]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from .tables import SHARDING_TYPES, PlacedShard, PlacedTable, Table

FORMAT, VERSION = "torchrec-bls plan", 1
_SHARD_FIELDS = {field.name for field in fields(PlacedShard)}
_OF_TABLE = ("module", "name", "rows", "dim", "sharding_type", "shards")


class PlanFileError(ValueError):
    """A file does not hold a plan, or holds a plan of other tables."""


@dataclass(frozen=True)
class SavedPlan:
    """The content of a plan's file.

    Attributes:
        ranks: world size.
        tables: tables with the rows and columns that they had when the plan was made; the file does
            not have the other fields of a Table.
    """

    ranks: int
    tables: tuple[PlacedTable, ...]

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


def save_plan(path: Path, plan: Iterable[PlacedTable], ranks: int) -> None:
    """Writes a plan, a table on a line.

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
    head = json.dumps({"format": FORMAT, "version": VERSION, "ranks": ranks})[:-1]
    path.write_text(head + ', "tables": [\n' + ",\n".join(lines) + "\n]}\n")


def read_plan(path: Path) -> SavedPlan:
    """Reads what `save_plan` wrote.

    Raises:
        PlanFileError: the file is no such file, is of another version, or has shards that do not
            make up the tables.
        OSError: it can't be read.
    """
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise PlanFileError(f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise PlanFileError(f"{path} is not a {FORMAT}: make one with `torchrec-bls plan --save`")
    if record.get("version") != VERSION:
        raise PlanFileError(
            f"{path} has version {record.get('version')!r}, and this package reads {VERSION}: plan "
            "again"
        )
    ranks, entries = record.get("ranks"), record.get("tables")
    if type(ranks) is not int or ranks < 1 or not isinstance(entries, list) or not entries:
        raise PlanFileError(f"{path} lacks ranks or tables: plan again")
    tables = []
    for number, entry in enumerate(entries):
        try:
            tables.append(_table(entry, ranks))
        except (TypeError, ValueError) as error:
            raise PlanFileError(f"{path}, table number {number}: {error}") from error
    paths = [placed.table.path for placed in tables]
    if len(set(paths)) < len(paths):
        raise PlanFileError(f"{path} plans a table twice: {sorted(paths)}")
    return SavedPlan(ranks, tuple(tables))


def _table(entry: Any, ranks: int) -> PlacedTable:
    if not isinstance(entry, dict) or set(entry) != set(_OF_TABLE):
        raise ValueError(f"must be an object of {', '.join(_OF_TABLE)}")
    kind, shards = entry["sharding_type"], entry["shards"]
    if kind not in SHARDING_TYPES:
        raise ValueError(f"sharding type {kind!r} is none of {', '.join(SHARDING_TYPES)}")
    if not isinstance(shards, list):
        raise ValueError("shards must be a list")
    numbers = [entry["rows"], entry["dim"], *(n for shard in shards for n in _numbers(shard))]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("rows, columns and ranks must be whole numbers, not negative")
    table = Table(str(entry["name"]), entry["rows"], entry["dim"], str(entry["module"]))
    placed = tuple(PlacedShard(**shard) for shard in shards)
    beyond = [shard.rank for shard in placed if shard.rank >= ranks]
    if beyond:
        raise ValueError(f"'{table.path}' has a shard on rank {beyond[0]}, of {ranks} ranks")
    _check_cover(table, placed)
    return PlacedTable(table, kind, placed)


def _numbers(shard: Any) -> list[Any]:
    if not isinstance(shard, dict) or set(shard) != _SHARD_FIELDS:
        raise ValueError(f"a shard must be an object of {', '.join(sorted(_SHARD_FIELDS))}")
    return list(shard.values())


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

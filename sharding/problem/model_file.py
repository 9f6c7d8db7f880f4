"""Reads a model's tables from a JSON file, for planning without the model itself."""

import json
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from ..cost_interface import TableReuse
from ..reuse.statistics import REUSE_BINS, TableStatistics
from .tables import Table, UniformReuse, Workload

_STATISTICS = ("pooling_factor", "unique_rows")
_LISTS = {"sharding_types"}


class ModelFileError(ValueError):
    """A file does not describe a model."""


def read_model(path: Path) -> Workload:
    """Returns the tables that a file describes: {"tables": [{"name": "t", "rows": 9, ...}, ...]}.

    The keys are the fields of Table. "name", "rows" and "dim" must be there. There may also be
    - "pooling_factor": mean ids per sample. A table without it has one id a feature; one warning
      names those tables.
    - "unique_rows": mean number of distinct rows that so many samples read, e.g. {"64": 140}, as
      `ReuseStatistics` counts them. Ids of a table without it are taken to be drawn uniformly.

    Raises:
        ModelFileError: the file is no such file, or a table is impossible.
        OSError: it can't be read.
    """
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise ModelFileError(f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("tables"), list):
        raise ModelFileError(f'{path} has no list "tables"')
    tables: list[Table] = []
    reuse: dict[str, TableReuse] = {}
    assumed = []
    for number, entry in enumerate(record["tables"]):
        try:
            table = _table(entry)
            if entry.get("pooling_factor") is None:
                assumed.append(table.name)
            reuse[table.path] = _reuse(table, entry)
        except (TypeError, ValueError) as error:
            raise ModelFileError(f"{path}, table number {number}: {error}") from error
        tables.append(table)
    if assumed:
        warnings.warn(
            f"no pooling_factor for {len(assumed)} of {len(tables)} tables, the first "
            f"'{assumed[0]}': taken is 1 id a feature",
            stacklevel=2,
        )
    try:
        return Workload(tables, reuse)
    except ValueError as error:
        raise ModelFileError(f"{path}: {error}") from error


def _table(entry: Any) -> Table:
    if not isinstance(entry, dict):
        raise ValueError(f"{entry!r} is not an object")
    types = {field.name: type(field.default) for field in fields(Table)}
    types |= {"name": str, "rows": int, "dim": int}
    values: dict[str, Any] = {}
    for name, value in entry.items():
        if name in _STATISTICS:
            continue
        if name not in types:
            raise ValueError(f"'{name}' is none of {', '.join([*types, *_STATISTICS])}")
        if name in _LISTS and isinstance(value, list):
            value = tuple(value)
        if type(value) is not types[name]:
            raise ValueError(f"'{name}' is {value!r}, not of type {types[name].__name__}")
        values[name] = value
    return Table(**values)


def _reuse(table: Table, entry: dict[str, Any]) -> TableReuse:
    factor = entry.get("pooling_factor")
    pooling_factor = float(table.features if factor is None else factor)
    counted = entry.get("unique_rows")
    if counted is None:
        return UniformReuse(table.rows, pooling_factor)
    if not isinstance(counted, dict) or not counted:
        raise ValueError(f"'unique_rows' is {counted!r}, not samples and their distinct rows")
    pairs = sorted((float(samples), float(unique)) for samples, unique in counted.items())
    sizes, unique = np.asarray(pairs).T
    if not (np.isfinite(pairs).all() and sizes[0] > 0 and (unique > 0).all()):
        raise ValueError(f"'unique_rows' is {counted!r}, but all of it must be positive")
    # Costs ask for no reuse factors: no profile has a model of them.
    return TableStatistics(pooling_factor, sizes, unique, np.zeros(REUSE_BINS), table.rows)

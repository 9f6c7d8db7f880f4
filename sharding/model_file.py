"""Reads a model's tables from a JSON file, for planning without the model itself."""

import json
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

from .estimates import TableReuse
from .tables import Table, UniformReuse, Workload

_STATISTICS = "pooling_factor"
_LISTS = {"sharding_types"}


class ModelFileError(ValueError):
    """A file does not describe a model."""


def read_model(path: Path) -> Workload:
    """Returns the tables that a file describes: {"tables": [{"name": "t", "rows": 9, ...}, ...]}.

    The keys are the fields of Table, of which "name", "rows" and "dim" must be there, and
    "pooling_factor": mean ids per sample, drawn uniformly. A table without it has one id a feature;
    one warning names those tables.

    Raises:
        ModelFileError: it is no such file, or a table is impossible.
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
            factor = entry.get(_STATISTICS)
            if factor is None:
                assumed.append(table.name)
            reuse[table.path] = UniformReuse(
                table.rows, float(table.features if factor is None else factor)
            )
        except (TypeError, ValueError) as error:
            raise ModelFileError(f"{path}, table number {number}: {error}") from error
        tables.append(table)
    if assumed:
        warnings.warn(
            f"no {_STATISTICS} for {len(assumed)} of {len(tables)} tables, the first "
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
        if name == _STATISTICS:
            continue
        if name not in types:
            raise ValueError(f"'{name}' is none of {', '.join([*types, _STATISTICS])}")
        if name in _LISTS and isinstance(value, list):
            value = tuple(value)
        if type(value) is not types[name]:
            raise ValueError(f"'{name}' is {value!r}, not of type {types[name].__name__}")
        values[name] = value
    return Table(**values)

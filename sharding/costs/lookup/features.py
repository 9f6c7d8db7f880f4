"""The numbers that the time of a lookup depends on: arrays with one row for each table shard."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...cost_interface import LookupWork
from ...reuse.statistics import REUSE_BINS

Floats = npt.NDArray[np.float64]

CACHE_LINE_BYTES = 64
PAGE_BYTES = 4096

#: Terms of the analytic model, each a count for one shard. A coefficient is microseconds for one.
TERMS = (
    "shard",
    "sample",
    "lookup",
    "lookup_element",
    "lookup_half_element",
    "unique_row",
    "unique_line",
    "unique_line_far",
    "unique_half_element",
    "output_element",
    "sort_digit",
)

#: What the residual's trees look at: base-2 logarithms, but for the weight's bytes.
TREE_COLUMNS = (
    "rows",
    "dim",
    "weight_bytes",
    "samples",
    "pooling",
    "lookups",
    "unique_rows",
    "reuse",
    "unique_bytes",
    "table_bytes",
)

REUSE_COLUMNS = tuple(f"reuse_factor_{i}" for i in range(REUSE_BINS))

_FIELDS = ("rows", "dim", "weight_bytes", "samples", "pooling", "unique_rows")


def as_columns(works: Sequence[LookupWork]) -> dict[str, Floats]:
    """Returns the numbers of many shards.

    Returns:
        Arrays by field name, (len(works),) float64 each.

    Raises:
        ValueError: a number of a shard is not finite or not positive (samples, pooling and unique
            rows may be 0), or there are more unique rows than rows.
    """
    table = np.asarray([[getattr(w, name) for name in _FIELDS] for w in works], dtype=np.float64)
    table = table.reshape(len(works), len(_FIELDS))
    least = np.asarray([1, 1, 1, 0, 0, 0], dtype=np.float64)
    bad = ~(np.isfinite(table) & (table >= least))
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise ValueError(f"{_FIELDS[column]} of a lookup is {table[row, column]}: {works[row]}")
    columns = {name: table[:, i] for i, name in enumerate(_FIELDS)}
    if (columns["unique_rows"] > columns["rows"] * (1 + 1e-9)).any():
        row = int((columns["unique_rows"] > columns["rows"] * (1 + 1e-9)).argmax())
        raise ValueError(f"more unique rows than rows: {works[row]}")
    return columns


def analytic_terms(columns: dict[str, Floats]) -> Floats:
    """Counts the terms that the analytic model charges for.

    `unique_line` is a cache line of a row that the step reads for the first time. `unique_line_far`
    is the same times the base-2 logarithm of the table's pages, for the walk through the page
    tables. `sort_digit` is an id times the bits that the backward's sort looks at. The `half` terms
    are those of 2-byte weights, which are converted.

    Returns:
        (n, len(TERMS)) float64.
    """
    c = columns
    lookups = c["samples"] * c["pooling"]
    row_bytes = c["dim"] * c["weight_bytes"]
    lines = np.ceil(row_bytes / CACHE_LINE_BYTES)
    pages = np.log2(1.0 + c["rows"] * row_bytes / PAGE_BYTES)
    half = c["weight_bytes"] < 4
    counts = {
        "shard": np.ones_like(lookups),
        "sample": c["samples"],
        "lookup": lookups,
        "lookup_element": lookups * c["dim"],
        "lookup_half_element": lookups * c["dim"] * half,
        "unique_row": c["unique_rows"] * pages,
        "unique_line": c["unique_rows"] * lines,
        "unique_line_far": c["unique_rows"] * lines * pages,
        "unique_half_element": c["unique_rows"] * c["dim"] * half,
        "output_element": c["samples"] * c["dim"],
        "sort_digit": lookups * np.log2(1.0 + c["rows"]),
    }
    return np.stack([counts[name] for name in TERMS], axis=1)


def tree_columns(columns: dict[str, Floats]) -> Floats:
    """Returns the columns that the residual depends on, (n, len(TREE_COLUMNS)) float64."""
    c = columns
    lookups = c["samples"] * c["pooling"]
    row_bytes = c["dim"] * c["weight_bytes"]
    numbers = {
        **{name: c[name] for name in ("rows", "dim", "samples", "pooling", "unique_rows")},
        "lookups": lookups,
        "reuse": lookups / np.maximum(c["unique_rows"], 1e-9),
        "unique_bytes": c["unique_rows"] * row_bytes,
        "table_bytes": c["rows"] * row_bytes,
    }
    logarithms = {name: np.log2(np.maximum(v, 2.0**-10)) for name, v in numbers.items()}
    logarithms["weight_bytes"] = c["weight_bytes"]
    return np.stack([logarithms[name] for name in TREE_COLUMNS], axis=1)

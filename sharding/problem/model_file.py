"""Reads a model's tables from a JSON file, for planning without the model itself."""

import warnings
from pathlib import Path

import numpy as np
from msgspec import structs

from torchrec_bls.records import AboveZero, Amount, Format, Positive, Record, Whole

from ..cost_interface import TableReuse
from ..reuse.statistics import REUSE_BINS, TableStatistics
from .tables import Table, UniformReuse, Workload


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
    records = _FILE.read(path).tables
    tables = [record.table() for record in records]
    reuse = {table.path: record.reuse(table) for table, record in zip(tables, records, strict=True)}
    assumed = [record.name for record in records if record.pooling_factor is None]
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


class _TableRecord(Record):
    """The fields of a Table, and statistics."""

    name: str
    rows: Positive
    dim: Positive
    module: str = Table.module
    weight_bytes: Positive = Table.weight_bytes
    features: Positive = Table.features
    pooled: bool = Table.pooled
    weighted: bool = Table.weighted
    optimizer_bytes_per_row: Whole = Table.optimizer_bytes_per_row
    optimizer_bytes_per_weight: Whole = Table.optimizer_bytes_per_weight
    sharding_types: tuple[str, ...] = Table.sharding_types
    min_columns: Positive = Table.min_columns
    pooling_factor: Amount | None = None
    unique_rows: dict[str, AboveZero] | None = None

    def __post_init__(self) -> None:
        table = self.table()
        if table.weights_bytes(table.rows, table.dim) > _MOST_BYTES:
            size = f"{self.rows} rows of {self.dim} weights"
            raise ValueError(f"its {size} take more than {_MOST_BYTES} bytes")
        self.reuse(table)

    def table(self) -> Table:
        values = structs.asdict(self)
        del values["pooling_factor"], values["unique_rows"]
        return Table(**values)

    def reuse(self, table: Table) -> TableReuse:
        factor = self.pooling_factor
        pooling_factor = float(table.features if factor is None else factor)
        if self.unique_rows is None:
            return UniformReuse(table.rows, pooling_factor)
        counted = self.unique_rows
        pairs = sorted((float(samples), unique) for samples, unique in counted.items())
        sizes, unique = np.asarray(pairs or [(0.0, 0.0)]).T
        if not (np.isfinite(sizes).all() and sizes[0] > 0):
            raise ValueError(f"'unique_rows' is {counted!r}, but all of it must be positive")
        # Costs ask for no reuse factors: no profile has a model of them.
        return TableStatistics(pooling_factor, sizes, unique, np.zeros(REUSE_BINS), table.rows)


class _ModelRecord(Record):
    tables: list[_TableRecord]


_MOST_BYTES = 1 << 60
_FILE = Format(_ModelRecord, "`torchrec-bls plan --help` shows what it holds", ModelFileError)

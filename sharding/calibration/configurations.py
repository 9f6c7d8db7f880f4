"""The lookups that a calibration measures, drawn so that they cover the tables of later plans."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchrec_bls.records import AboveZero, Amount, Positive, Whole

Integers = npt.NDArray[np.int64]

DIMS = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
LEAST_ROWS, MOST_ROWS = 100, 4_000_000
LEAST_SAMPLES, MOST_SAMPLES = 32, 8192
LEAST_POOLING, MOST_POOLING = 0.5, 64.0
MOST_TABLES = 12
#: A lookup of more elements than this takes too long to repeat.
MOST_ELEMENTS = 24_000_000
MOST_TABLE_BYTES = 256 * 2**20

# Larger than any table: multiplying by it modulo the rows is a permutation.
_SCATTER_PRIME = 2_654_435_761


@dataclass(frozen=True)
class TableConfiguration:
    """One table of a lookup.

    Attributes:
        rows: rows of the table.
        dim: columns of the table.
        pooling: ids of a sample; a fraction is the mean over samples.
        skew: exponent of the Zipf law that the ids follow; 0 is uniform.
    """

    rows: Positive
    dim: Positive
    pooling: AboveZero
    skew: Amount


@dataclass(frozen=True)
class LookupConfiguration:
    """One fused lookup.

    Attributes:
        tables: tables that are looked up together.
        samples: samples of the batch.
        weight_bytes: 4 or 2.
        pooled: True for sums of bags, False for a row for each id.
        seed: seed of the ids.
    """

    tables: tuple[TableConfiguration, ...]
    samples: Positive
    weight_bytes: Literal[4, 2]
    pooled: bool
    seed: Whole

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> LookupConfiguration:
        """Reads what `as_json` wrote."""
        tables = tuple(TableConfiguration(**table) for table in record["tables"])
        return cls(**{**record, "tables": tables})

    def table_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(table.rows * table.dim for table in self.tables) * self.weight_bytes


def draw_lookups(count: int, *, seed: int, memory_bytes: int) -> list[LookupConfiguration]:
    """Draws configurations. The first ones do not depend on how many follow.

    Rows, samples and pooling factors are log-uniform. Two of three configurations have tables that
    differ in rows, dim, pooling and skew. The others have equal tables.

    Args:
        count: number of configurations.
        seed: seed, not negative.
        memory_bytes: bytes that the weights of one configuration may take.
    """
    return [_draw(np.random.default_rng([seed, i]), memory_bytes) for i in range(count)]


def _draw(random: np.random.Generator, memory_bytes: int) -> LookupConfiguration:
    pooled = bool(random.random() >= 0.25)
    weight_bytes: Literal[4, 2] = 4 if random.random() < 0.75 else 2
    tables = int(random.choice([1, 1, 2, 3, 4, 6, 8, MOST_TABLES]))
    samples = round(_log_uniform(random, LEAST_SAMPLES, MOST_SAMPLES))
    alike = random.random() < 1 / 3
    drawn = [_draw_table(random, weight_bytes) for _ in range(1 if alike else tables)]
    drawn = drawn * tables if alike else drawn
    if not pooled:  # FBGEMM fuses such lookups only where all rows have one length.
        drawn = [_with(table, dim=drawn[0].dim) for table in drawn]
    # Without pooling a backward sorts and adds up far more slowly.
    most_elements = MOST_ELEMENTS if pooled else MOST_ELEMENTS // 8
    while sum(table.rows * table.dim for table in drawn) * weight_bytes > memory_bytes:
        drawn = [_with(table, rows=max(table.rows // 2, LEAST_ROWS)) for table in drawn]
    while sum(samples * table.pooling * table.dim for table in drawn) > most_elements:
        if samples > LEAST_SAMPLES * 4:
            samples //= 2
        else:
            drawn = [_with(t, pooling=max(t.pooling / 2, LEAST_POOLING)) for t in drawn]
    return LookupConfiguration(
        tables=tuple(drawn),
        samples=samples,
        weight_bytes=weight_bytes,
        pooled=pooled,
        seed=int(random.integers(2**31)),
    )


def _draw_table(random: np.random.Generator, weight_bytes: int) -> TableConfiguration:
    dim = int(random.choice(DIMS))
    most_rows = min(MOST_ROWS, MOST_TABLE_BYTES // (dim * weight_bytes))
    return TableConfiguration(
        rows=round(_log_uniform(random, LEAST_ROWS, most_rows)),
        dim=dim,
        pooling=round(_log_uniform(random, LEAST_POOLING, MOST_POOLING), 2),
        skew=0.0 if random.random() < 0.25 else round(float(random.uniform(0.4, 1.6)), 2),
    )


def draw_ids(
    table: TableConfiguration, samples: int, random: np.random.Generator
) -> tuple[Integers, Integers]:
    """Draws one batch of a table.

    Ids follow a bounded Zipf law, drawn by inversion of its density's integral. They are scattered
    over the table as hashing does. Lengths are the pooling factor, rounded up or down at random.

    Returns:
        The lengths, (samples,) int64, and the ids, (sum of lengths,) int64.
    """
    whole = int(table.pooling)
    lengths = whole + (random.random(samples) < table.pooling - whole).astype(np.int64)
    uniform = random.random(int(lengths.sum()))
    power = 1.0 - table.skew
    if abs(power) < 1e-9:
        popularity = np.power(table.rows + 1.0, uniform)
    else:
        mass = np.power(table.rows + 1.0, power) - 1.0
        popularity = np.power(1.0 + uniform * mass, 1.0 / power)
    rank = np.clip(popularity.astype(np.int64) - 1, 0, table.rows - 1)
    return lengths, rank * _SCATTER_PRIME % table.rows


def _log_uniform(random: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(random.uniform(np.log(low), np.log(high))))


def _with(table: TableConfiguration, **changes: Any) -> TableConfiguration:
    return TableConfiguration(**{**asdict(table), **changes})

"""The verdict on each table of some samples: its class, its bound, and the stages that pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from torchrec_bls.analysis.compression_speeds import measure
from torchrec_bls.analysis.frames import rounded
from torchrec_bls.analysis.patterns import (
    distinct,
    entropy,
    homogenization,
    looked_up,
    zero_rows,
)
from torchrec_bls.analysis.samples import Floats, Lookup, SampledTable, Samples
from torchrec_bls.analysis.table_classes import ClassBounds, TableClass, class_of
from torchrec_bls.codecs.compression import Compression, Measured, chosen, ranked, speed_up

_FLOAT32 = "FP32"
_MANY_ZEROS = 0.5


@dataclass(frozen=True)
class Patterns:
    """Facts about a table's rows. Means are over the batches that have any rows.

    Attributes:
        rows: mean number of rows of a batch. Here and below, bags without ids do not count.
        distinct_ids: mean number of distinct ids of a batch.
        distinct_rows: mean number of distinct rows of a batch.
        rounded_rows: mean number of rows that still differ once rounded by the probe.
        eta: share of the distinct rows of a batch that rounding makes equal to others, the mean
            over batches (equation 1).
        entropy_bits: least bits for a value of a distinct row, if values are coded one by one after
            rounding by the table's bound; a mean.
        zero_share: share of rows that are nothing but zeros once rounded by the table's bound.
    """

    rows: float
    distinct_ids: float
    distinct_rows: float
    rounded_rows: float
    eta: float
    entropy_bits: float
    zero_share: float

    @property
    def homo_index(self) -> float:
        """Returns 1 - eta, which Tables III and IV of the paper print."""
        return 1 - self.eta


@dataclass(frozen=True)
class TableAnalysis:
    """The results for one table.

    Attributes:
        table: the table as recorded.
        patterns: facts about its rows.
        table_class: class of its bound: small, medium or large.
        bound: bound of the error.
        measured: ratio and speeds of the stages on its rows, on this machine.
        ranked: these stages, the fastest first by equation 2.
        speed_up: speed-up of the exchange for each stage, over sending rows as they are at no cost,
            by equation 2.
    """

    table: SampledTable
    patterns: Patterns
    table_class: TableClass
    bound: float
    measured: dict[Compression, Measured]
    ranked: list[Compression]
    speed_up: dict[Compression, float]

    @property
    def warning(self) -> str | None:
        """Returns what is wrong with the table's rows, or None."""
        zeros = self.patterns.zero_share
        if zeros <= _MANY_ZEROS:
            return None
        return (
            f"table '{self.table.name}': {zeros:.0%} of the rows are zero at the bound "
            f"{self.bound:g}: record a trained model, or take smaller bounds"
        )


@dataclass(frozen=True)
class LeftAlone:
    """A table whose rows stay float32.

    Attributes:
        table: the table as recorded.
        reason: reason in words.
    """

    table: SampledTable
    reason: str


@dataclass(frozen=True)
class Analysis:
    """The results for all tables.

    Attributes:
        link: bytes per second from one rank to the others.
        link_source: source of that number, for people.
        ranks_per_core: number of ranks that share a core.
        bounds: bounds of the classes.
        batches: number of recorded batches.
        tables: tables that can be compressed.
        left_alone: other tables.
    """

    link: float
    link_source: str
    ranks_per_core: float
    bounds: ClassBounds
    batches: int
    tables: list[TableAnalysis]
    left_alone: list[LeftAlone]

    @property
    def chosen(self) -> dict[str, Compression]:
        """Returns the stages of each table, which is none's fastest where all are faster without
        encoding."""
        measured = {each.table.name: each.measured for each in self.tables}
        return chosen(measured, self.link, self.ranks_per_core)

    @property
    def warnings(self) -> list[str]:
        """Returns what people need to know before they use the bounds."""
        found = [each.warning for each in self.tables if each.warning is not None]
        stages = self.chosen
        if any(stages[each.table.name] is not each.ranked[0] for each in self.tables):
            found.append(
                "rows of all tables travel as they are: encoding some tables would cost the others "
                "more than it saves"
            )
        return found + [
            f"table '{each.table.name}' stays float32: {each.reason}" for each in self.left_alone
        ]


def analyse(
    samples: Samples,
    link: float,
    link_source: str,
    bounds: ClassBounds,
    ranks_per_core: float = 1.0,
) -> Analysis:
    """Analyses each table of the samples, and measures the times of its stages. That takes seconds.

    Args:
        samples: samples of a model.
        link: bytes per second from one rank to the others.
        link_source: source of that number, for people.
        bounds: bounds of the classes.
        ranks_per_core: number of ranks that share a core, at least 1.

    Raises:
        ValueError: a file of the samples is damaged, or the link is not positive.
    """
    found, left_alone = [], []
    for table in tqdm(samples.tables, desc="analysing", unit="table", leave=False, disable=None):
        if table.data_type != _FLOAT32:
            reason = f"its rows are {table.data_type}, and only {_FLOAT32} can be encoded"
            left_alone.append(LeftAlone(table, reason))
            continue
        batches = [batch for batch in samples.of(table) if _rows_with_ids(table, batch).size]
        if batches:
            found.append(_analyse(table, batches, (link, ranks_per_core), bounds))
        else:
            left_alone.append(LeftAlone(table, "the samples have no ids of it; record more"))
    return Analysis(link, link_source, ranks_per_core, bounds, samples.batches, found, left_alone)


def _analyse(
    table: SampledTable,
    batches: Sequence[Sequence[Lookup]],
    link: tuple[float, float],
    bounds: ClassBounds,
) -> TableAnalysis:
    probed = [_Batch(table, batch, bounds.probe) for batch in batches]
    eta = _mean([batch.eta for batch in probed])
    share = _mean([batch.distinct_share for batch in probed])
    table_class = class_of(eta, share)
    bound = bounds.of(table_class)
    at_bound = [_Batch(table, batch, bound) for batch in batches]
    measured = measure(table, batches, bound)
    patterns = Patterns(
        rows=_mean([batch.rows for batch in probed]),
        distinct_ids=_mean([batch.distinct_ids for batch in probed]),
        distinct_rows=_mean([batch.distinct_rows for batch in probed]),
        rounded_rows=_mean([batch.rounded_rows for batch in probed]),
        eta=eta,
        entropy_bits=_mean([batch.entropy_bits for batch in at_bound]),
        zero_share=sum(b.zeros for b in at_bound) / sum(b.rows for b in at_bound),
    )
    return TableAnalysis(
        table=table,
        patterns=patterns,
        table_class=table_class,
        bound=bound,
        measured=measured,
        ranked=ranked(measured, *link),
        speed_up={stages: speed_up(stages, each, *link) for stages, each in measured.items()},
    )


class _Batch:
    """The facts that one batch shows about a table.

    Args:
        table: table that the batch looks up.
        lookups: lookups of its features; some have ids.
        bound: bound that rows are rounded by.
    """

    def __init__(self, table: SampledTable, lookups: Sequence[Lookup], bound: float) -> None:
        before = _rows_with_ids(table, lookups)
        after = rounded(before, bound)
        different = distinct(after)
        self.rows = len(before)
        self.distinct_ids = len(np.unique(np.concatenate([lookup.ids for lookup in lookups])))
        self.distinct_rows = len(distinct(before))
        self.rounded_rows = len(different)
        self.eta = homogenization(self.distinct_rows, self.rounded_rows)
        self.distinct_share = self.distinct_rows / self.rows
        self.entropy_bits = entropy(different)
        self.zeros = zero_rows(after)


def _rows_with_ids(table: SampledTable, lookups: Sequence[Lookup]) -> Floats:
    """Returns (rows, dim) of all features, without those of bags that have no ids."""
    return np.concatenate([lookup.rows[looked_up(lookup, table.pooled)] for lookup in lookups])


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)

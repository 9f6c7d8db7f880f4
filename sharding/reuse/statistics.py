"""How a table's rows recur in a batch, from sample batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

#: Bins of the reuse factors; the last one is open. Bin i holds counts in (2 ** (i - 1), 2 ** i].
REUSE_BINS = 17


def bin_edges() -> tuple[Floats, Floats]:
    """Ends of the bins, (17,) float64 each: counts are in (low, high], the last high infinite."""
    high = np.append(2.0 ** np.arange(REUSE_BINS - 1), np.inf)
    low = np.concatenate([[0.0], high[:-1]])
    return low, high


def row_counts(ids: Integers) -> Integers:
    """How often each row that occurs in `ids` occurs, (unique rows,) int64."""
    return np.unique(ids, return_counts=True)[1].astype(np.int64)


def reuse_factors(counts: Integers, *, by: str = "rows") -> Floats:
    """The 17-bin histogram of how often rows are read in a batch (performance paper, sec. IV-C).

    Bin 0 holds rows that are read once, bin i those read more than 2 ** (i - 1) and up to 2 ** i
    times, the last bin all above 2 ** 15: the bins of dlrm_datasets, closed on the right. There
    are two conventions of what a bin counts, and the paper's is the default:

    - "rows": the share of the rows that occur (the paper's RF, dlrm_datasets' "histogram of col
      sizes").
    - "lookups": the share of the lookups that go to such rows (dlrm_datasets' "ratio of index
      distribution").

    Args:
        counts: (unique rows,) int64, each at least 1.
        by: "rows" or "lookups".

    Returns:
        (17,) float64 that sums to 1, or all 0 without any rows.

    Raises:
        ValueError: another convention, or a count below 1.
    """
    if by not in ("rows", "lookups"):
        raise ValueError(f"reuse factors are by 'rows' or by 'lookups', not by {by!r}")
    if not len(counts):
        return np.zeros(REUSE_BINS)
    if counts.min() < 1:
        raise ValueError("a row that occurs has a count of at least 1")
    bins = np.minimum(np.ceil(np.log2(counts)).astype(np.int64), REUSE_BINS - 1)
    weights = counts if by == "lookups" else np.ones_like(counts)
    histogram = np.bincount(bins, weights, REUSE_BINS).astype(np.float64)
    normalized: Floats = histogram / histogram.sum()
    return normalized


@dataclass(frozen=True)
class TableStatistics:
    """How one table's rows recur.

    Attributes:
        pooling_factor: mean ids per sample.
        sample_sizes: (n,) float64, ascending: batch sizes that were looked at.
        unique_at: (n,) float64: the mean number of distinct rows in batches of these sizes.
        reuse_factors: (17,) float64, by rows, of the largest of these sizes.
        rows: rows of the table if known, the limit of `unique_rows`.
    """

    pooling_factor: float
    sample_sizes: Floats
    unique_at: Floats
    reuse_factors: Floats
    rows: int | None = None

    def unique_rows(self, samples: float) -> float:
        """Distinct rows that a batch of `samples` reads.

        Between the sizes that were looked at it is interpolated on logarithmic axes (Heaps' law).
        Below them the way is from one sample, whose ids all differ: a part of a batch recurs less
        than the whole. Beyond them it goes on with the last slope, but never above the lookups or
        the table's rows.
        """
        if samples <= 0 or self.pooling_factor <= 0:
            return 0.0
        lookups = samples * self.pooling_factor
        sizes, unique = self.sample_sizes, self.unique_at
        if sizes[0] > 1:
            of_one = min(self.pooling_factor, float(unique[0]))
            sizes, unique = np.append(1.0, sizes), np.append(of_one, unique)
        x, y = np.log(sizes), np.log(np.maximum(unique, 1e-9))
        at = float(np.log(samples))
        if at <= x[0]:
            estimate = unique[0] * samples / sizes[0]
        elif at <= x[-1] or len(x) == 1:
            estimate = float(np.exp(np.interp(at, x, y)))
        else:
            slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
            estimate = float(np.exp(y[-1] + min(max(slope, 0.0), 1.0) * (at - x[-1])))
        limit = lookups if self.rows is None else min(lookups, float(self.rows))
        return float(min(estimate, limit))


class ReuseStatistics(dict[str, TableStatistics]):
    """Statistics of each table, by name."""

    @classmethod
    def from_batches(
        cls,
        batches: Iterable[KeyedJaggedTensor],
        *,
        tables: dict[str, str] | None = None,
        rows: dict[str, int] | None = None,
    ) -> ReuseStatistics:
        """Counts the rows in sample batches.

        The batches are taken as one long run of samples, in order. `unique_rows` is learned at
        sizes that double, from the mean over as many disjoint stretches of that size as there are,
        at most 8.

        Args:
            batches: ids by feature, at least one sample in all.
            tables: feature to table; several features may share one, whose ids are then counted
                together and whose pooling factors add up. By default each feature is a table.
            rows: rows of each table, as a limit, where known.

        Raises:
            ValueError: no samples, or batches with different features.
        """
        features: list[str] | None = None
        lengths: list[list[Integers]] = []
        ids: list[list[Integers]] = []
        for batch in batches:
            if features is None:
                features = list(batch.keys())
                lengths, ids = [[] for _ in features], [[] for _ in features]
            if list(batch.keys()) != features:
                raise ValueError(f"a batch has features {batch.keys()}, the first had {features}")
            for i, feature in enumerate(features):
                jagged = batch[feature]
                lengths[i].append(jagged.lengths().cpu().numpy().astype(np.int64))
                ids[i].append(jagged.values().cpu().numpy().astype(np.int64))
        if features is None or not sum(len(part) for part in lengths[0]):
            raise ValueError("reuse statistics need at least one sample")
        of_table: dict[str, list[int]] = {}
        for i, feature in enumerate(features):
            of_table.setdefault((tables or {}).get(feature, feature), []).append(i)
        statistics = cls()
        for table, members in of_table.items():
            statistics[table] = table_statistics(
                [np.concatenate(lengths[i]) for i in members],
                [np.concatenate(ids[i]) for i in members],
                rows=(rows or {}).get(table),
            )
        return statistics


def table_statistics(
    lengths: Sequence[Integers], ids: Sequence[Integers], rows: int | None = None
) -> TableStatistics:
    """Statistics of one table from the features that read it.

    Args:
        lengths: ids per sample, (samples,) int64 for each feature.
        ids: the ids, (sum of lengths,) int64 for each feature.
        rows: rows of the table if known.
    """
    samples = len(lengths[0])
    ends = [np.concatenate([[0], np.cumsum(each)]) for each in lengths]
    sizes, unique = [], []
    size = samples
    while size >= 1:
        starts = range(0, samples - size + 1, size)[:8]
        counted = [
            len(
                np.unique(
                    np.concatenate(
                        [i[e[start] : e[start + size]] for i, e in zip(ids, ends, strict=True)]
                    )
                )
            )
            for start in starts
        ]
        sizes.append(size)
        unique.append(float(np.mean(counted)))
        size //= 2
    return TableStatistics(
        pooling_factor=float(sum(each.sum() for each in lengths) / samples),
        sample_sizes=np.asarray(sizes[::-1], dtype=np.float64),
        unique_at=np.asarray(unique[::-1]),
        reuse_factors=reuse_factors(row_counts(np.concatenate(ids))),
        rows=rows,
    )

"""How often a table's rows recur in a batch, counted in sample batches."""

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


def row_counts(ids: Integers) -> Integers:
    """Returns how often each row that occurs in `ids` occurs, (unique rows,) int64."""
    return np.unique(ids, return_counts=True)[1].astype(np.int64)


def reuse_factors(counts: Integers) -> Floats:
    """Returns the 17-bin histogram of how often rows are read in a batch (performance paper, IV-C).

    Bin 0 holds rows that are read once. Bin i holds rows that are read more than 2 ** (i - 1) and
    up to 2 ** i times. The last bin holds all above 2 ** 15. These are the bins of dlrm_datasets,
    closed on the right. A bin has the share of the rows that occur: the paper's RF, dlrm_datasets'
    "histogram of col sizes".

    Args:
        counts: (unique rows,) int64, each at least 1.

    Returns:
        (17,) float64 that sums to 1, or all 0 without any rows.

    Raises:
        ValueError: a count is below 1.
    """
    if not len(counts):
        return np.zeros(REUSE_BINS)
    if counts.min() < 1:
        raise ValueError("a row that occurs has a count of at least 1")
    bins = np.minimum(np.ceil(np.log2(counts)).astype(np.int64), REUSE_BINS - 1)
    histogram = np.bincount(bins, minlength=REUSE_BINS).astype(np.float64)
    normalized: Floats = histogram / histogram.sum()
    return normalized


@dataclass(frozen=True)
class TableStatistics:
    """How often one table's rows recur.

    Attributes:
        pooling_factor: mean ids per sample.
        sample_sizes: (n,) float64, batch sizes that were counted, ascending.
        unique_at: (n,) float64, mean number of distinct rows in batches of these sizes.
        reuse_factors: (17,) float64, reuse factors by rows, for the largest of these sizes.
        rows: rows of the table if known, the limit of `unique_rows`.
    """

    pooling_factor: float
    sample_sizes: Floats
    unique_at: Floats
    reuse_factors: Floats
    rows: int | None = None

    def unique_rows(self, samples: float) -> float:
        """Returns the distinct rows that a batch of `samples` reads.

        Between the counted sizes the number is interpolated on logarithmic axes (Heaps' law). Below
        them the interpolation begins at one sample, whose ids all differ: rows recur less in a part
        of a batch than in the whole. Beyond them the last slope goes on. The number is never above
        the lookups or the table's rows.
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

        The batches count as one long run of samples, in order. `unique_rows` is counted at sizes
        that double. Each count is the mean over disjoint parts of that size, as many as there are,
        but at most 8.

        Args:
            batches: ids by feature, at least one sample in all.
            tables: table of each feature; several features may share one. Then their ids are
                counted together and their pooling factors add up. By default each feature is a
                table.
            rows: rows of each table, as a limit, where known.

        Raises:
            ValueError: there are no samples, or batches have different features.
        """
        features: list[str] | None = None
        lengths: list[list[Integers]] = []
        ids: list[list[Integers]] = []
        for batch in batches:
            if features is None:
                features = list(batch.keys())
                lengths, ids = [[] for _ in features], [[] for _ in features]
            if list(batch.keys()) != features:
                raise ValueError(
                    f"a batch has features {batch.keys()}, the first had {features}: count the "
                    "inputs of each collection apart, and put them together with `update`"
                )
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
    """Returns the statistics of one table from the features that read it.

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

"""Makes batches whose rows recur as given statistics say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torchrec_bls.sharding.reuse.statistics import REUSE_BINS, TableStatistics

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# Counts of the open bin are drawn from a bin as wide as if it ended here.
_OPEN_BIN_ENDS = 4


def bin_edges() -> tuple[Floats, Floats]:
    """Returns both ends of the bins, (17,) float64 each: counts are in (low, high], the last is
    inf."""
    high = np.append(2.0 ** np.arange(REUSE_BINS - 1), np.inf)
    low = np.concatenate([[0.0], high[:-1]])
    return low, high


def generate_batch(
    statistics: Mapping[str, TableStatistics], samples: int, *, seed: int
) -> KeyedJaggedTensor:
    """Makes one batch with a feature for each table.

    Args:
        statistics: by table, of batches of at least `samples`.
        samples: of the batch, at least 1.
        seed: not negative; another one makes another batch of the same statistics.

    Raises:
        ValueError: statistics of smaller batches only.
    """
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    drawn = [
        generate_table(table, samples, np.random.default_rng([seed, i]))
        for i, table in enumerate(statistics.values())
    ]
    return KeyedJaggedTensor(
        keys=list(statistics),
        values=torch.from_numpy(np.concatenate([ids for _, ids in drawn])),
        lengths=torch.from_numpy(np.concatenate([lengths for lengths, _ in drawn])),
    )


def generate_table(
    table: TableStatistics, samples: int, random: np.random.Generator
) -> tuple[Integers, Integers]:
    """Makes one table's part of a batch.

    Each row's count in the largest batch of the statistics is drawn from their reuse factors. All
    these lookups are shuffled, and the first ones are the batch: a part of a batch reads rows less
    often than the whole does. Sample by sample, lengths follow a multinomial law.

    Args:
        table: statistics.
        samples: at least 1, at most the largest batch of the statistics.
        random: generator.

    Returns:
        lengths (samples,) int64 and ids (sum of lengths,) int64, in [0, rows) if the statistics
        have rows, else in [0, unique rows).
    """
    whole = round(float(table.sample_sizes[-1]))
    if not 1 <= samples <= whole:
        raise ValueError(f"{samples} samples; the statistics are of batches of 1 to {whole}")
    counts = _row_counts(
        table.reuse_factors,
        unique_rows=round(float(table.unique_at[-1])),
        lookups=round(whole * table.pooling_factor),
        random=random,
    )
    rows = table.rows if table.rows is not None else len(counts)
    names = random.choice(rows, size=len(counts), replace=False)
    pool = random.permutation(np.repeat(names, counts))
    taken = min(round(samples * table.pooling_factor), len(pool))
    lengths = random.multinomial(taken, np.full(samples, 1.0 / samples))
    return lengths.astype(np.int64), pool[:taken].astype(np.int64)


def _row_counts(
    shares: Floats, *, unique_rows: int, lookups: int, random: np.random.Generator
) -> Integers:
    """Draws how often each row is read, (unique_rows,) int64, `lookups` in all.

    Within a bin counts are log-uniform; then they are moved inside their bins until the sum is
    right. What the bins can't take goes to the most popular row.
    """
    if not unique_rows or not lookups:
        return np.zeros(0, dtype=np.int64)
    edges_low, edges_high = bin_edges()
    low = np.floor(edges_low).astype(np.int64) + 1
    high = np.where(np.isinf(edges_high), edges_low * _OPEN_BIN_ENDS, edges_high).astype(np.int64)
    in_bin = random.multinomial(unique_rows, shares / shares.sum())
    bins = np.repeat(np.arange(REUSE_BINS), in_bin)
    least, most = low[bins], high[bins]
    position = random.random(unique_rows)

    def counts_at(tilt: float) -> Integers:
        """Counts where positions within the bins are bent by `tilt`; rises with it."""
        bent = position ** np.exp(-tilt)
        spread = np.exp(np.log(least) + bent * np.log(most / least))
        counts: Integers = np.clip(np.rint(spread).astype(np.int64), least, most)
        return counts

    bottom, top = -8.0, 8.0
    for _ in range(50):
        middle = (bottom + top) / 2
        if counts_at(middle).sum() < lookups:
            bottom = middle
        else:
            top = middle
    counts = counts_at(bottom)
    missing = lookups - int(counts.sum())
    largest = int(counts.argmax())
    counts[largest] = max(1, counts[largest] + missing)
    return counts

"""Generated batches in Criteo's shape, for runs without the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from torchrec.datasets.utils import Batch

from torchrec_bls.datasets.batch import make_batch
from torchrec_bls.datasets.criteo_shape import (
    CATEGORICAL_FEATURES,
    DENSE_FEATURES,
    check_rows_per_table,
)

#: Skew of the ids. A table of 10 million rows then has 8 % of its look-ups in one row, and the
#: largest columns of Criteo's own rows have 6 %.
ZIPF_EXPONENT = 1.05

# A prime larger than any table: multiplying by it modulo the rows is a permutation. It spreads the
# popular ids over the table as hashing does. Otherwise one row-wise shard would hold them all.
SCATTER_PRIME = 2_654_435_761


class SyntheticDataset:
    """One rank's generated batches. The same seed, step and rank give the same batch.

    Ids follow a bounded Zipf law (``ZIPF_EXPONENT``), scattered over the table. Dense features are
    uniform in [0, 1), and labels are fair coins, as in facebookresearch/dlrm's random generator.

    Args:
        rows_per_table: rows of the 26 tables.
        batch_size: rows of a batch.
        steps: number of batches.
        seed: seed of the whole data set, not negative.
        rank: this rank.
        max_ids_per_table: largest number of ids of a (row, table). The number is drawn uniformly
            from 1 to this, but is never above the table's rows. 1 gives Criteo's one id a table,
            100 is the heterogeneous setting of the BLS paper (sec. V-E1).

    Raises:
        ValueError: an argument is bad.
    """

    def __init__(
        self,
        *,
        rows_per_table: Sequence[int],
        batch_size: int,
        steps: int,
        seed: int,
        rank: int = 0,
        max_ids_per_table: int = 1,
    ) -> None:
        check_rows_per_table(list(rows_per_table))
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("steps", steps, 0),
            ("seed", seed, 0),
            ("rank", rank, 0),
            ("max_ids_per_table", max_ids_per_table, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; at least {least} is needed")
        if max(rows_per_table) >= SCATTER_PRIME:
            raise ValueError(f"a table of {max(rows_per_table)} rows; at most {SCATTER_PRIME - 1}")
        self._rows_per_table = np.asarray(rows_per_table, dtype=np.int64)
        self._batch_size = batch_size
        self._steps = steps
        self._seed = seed
        self._rank = rank
        self._max_ids_per_table = max_ids_per_table

    def __len__(self) -> int:
        """Returns the number of batches."""
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches of steps 0, 1, ..."""
        return (self.batch(step) for step in range(self._steps))

    def batch(self, step: int) -> Batch:
        """Makes the batch of one step."""
        random = np.random.default_rng([self._seed, step, self._rank])
        most_ids = np.minimum(self._rows_per_table, self._max_ids_per_table)
        lengths = random.integers(
            1,
            most_ids[:, None],
            endpoint=True,
            size=(CATEGORICAL_FEATURES, self._batch_size),
            dtype=np.int32,
        )
        ids_per_table = lengths.sum(axis=1)
        uniform = random.random(int(ids_per_table.sum()))
        ids = zipf_ids(uniform, np.repeat(self._rows_per_table, ids_per_table))
        dense = random.random((self._batch_size, DENSE_FEATURES), dtype=np.float32)
        labels = random.integers(0, 2, size=self._batch_size, dtype=np.int32)
        return make_batch(labels, dense, ids, lengths)


def zipf_ids(
    uniform: npt.NDArray[np.float64], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Turns uniform numbers into ids of a bounded Zipf law.

    The density x ** -``ZIPF_EXPONENT`` over [1, rows + 1) is inverted in closed form and rounded
    down. That needs no table of probabilities.

    Args:
        uniform: (n,), uniform numbers in [0, 1).
        rows: (n,), number of rows of the table that each id belongs to.

    Returns:
        The ids, (n,) int64, in [0, rows).
    """
    power = 1.0 - ZIPF_EXPONENT
    mass = np.power(rows + 1.0, power) - 1.0
    popularity = np.power(1.0 + uniform * mass, 1.0 / power).astype(np.int64) - 1
    ids: npt.NDArray[np.int64] = np.clip(popularity, 0, rows - 1) * SCATTER_PRIME % rows
    return ids

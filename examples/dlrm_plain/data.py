"""Generated batches in Criteo's shape, as one rank needs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

DENSE_FEATURES = 13
#: Criteo's 26 tables, cut to 20,000 rows so that they fit any machine.
ROWS_PER_TABLE = (
    *(1460, 583, 20000, 20000, 305, 24, 12517, 633, 3, 20000, 5683, 20000, 3194),
    *(27, 14992, 20000, 10, 5652, 2173, 4, 20000, 18, 15, 20000, 105, 20000),
)


@dataclass(frozen=True)
class Batch:
    """One rank's input of a batch: its own rows of the dense part, all rows of its own tables.

    Attributes:
        dense: (rows of this rank, 13) float32.
        ids: the ids of all ranks' rows for each own table, rank by rank.
        offsets: where each row's ids begin, for each own table.
    """

    dense: torch.Tensor
    ids: list[torch.Tensor]
    offsets: list[torch.Tensor]


def generate(
    rank: int, ranks: int, own_tables: Sequence[int], *, rows: int, steps: int
) -> Iterator[Batch]:
    """Yields `steps` batches with `rows` rows for each rank and one id in each table."""
    for step in range(steps):
        ids = [
            torch.randint(ROWS_PER_TABLE[table], (ranks * rows,), generator=_generator(step, table))
            for table in own_tables
        ]
        dense = torch.rand(ranks * rows, DENSE_FEATURES, generator=_generator(step, -1))
        yield Batch(
            dense=dense[rank * rows : (rank + 1) * rows],
            ids=ids,
            offsets=[torch.arange(ranks * rows)] * len(ids),
        )


def _generator(step: int, table: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + table + 1)

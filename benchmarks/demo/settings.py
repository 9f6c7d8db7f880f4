"""What a run of the demo is made of, and the inputs that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torchrec.datasets.utils import Batch

from torchrec_bls.datasets import CriteoDataset, SyntheticDataset, capped_cardinalities

#: Larger tables are cut to this: 26 of them at dimension 64 then take 48 MB.
MAX_TABLE_ROWS = 20_000

# Keeps the drawn delays apart from everything else drawn from the same seed.
DELAY_STREAM = 0x64656C6179


@dataclass(frozen=True)
class Settings:
    """Options of the demo.

    Attributes:
        data: Criteo file, or None for generated rows.
        ranks: number of processes.
        bounds: bounds to run, in the order of the table.
        steps: batches of a run.
        runs: repetitions of each measurement.
        batch: rows of a rank's batch.
        max_delay: upper end of the drawn delays, seconds.
        embedding_dim: columns of every table.
        seed: seed of the weights, the delays and the generated rows.
        max_ids_per_table: generated rows have from 1 to this many ids in each table.
        straggler: rank whose delays are twice as long, or None.
    """

    data: Path | None
    ranks: int
    bounds: tuple[int, ...]
    steps: int
    runs: int
    batch: int
    max_delay: float
    embedding_dim: int
    seed: int
    max_ids_per_table: int = 1
    straggler: int | None = None

    @property
    def rows_per_table(self) -> list[int]:
        """Rows of the 26 tables."""
        return capped_cardinalities(MAX_TABLE_ROWS)


def load_batches(settings: Settings, rank: int) -> list[Batch]:
    """Loads one rank's batches before anything is timed, as the BLS paper does (sec. V-C).

    A file with fewer rows than the steps need is read again from its start.
    """
    if settings.data is None:
        return list(
            SyntheticDataset(
                rows_per_table=settings.rows_per_table,
                batch_size=settings.batch,
                steps=settings.steps,
                seed=settings.seed,
                rank=rank,
                max_ids_per_table=settings.max_ids_per_table,
            )
        )
    dataset = CriteoDataset(
        settings.data,
        rows_per_table=settings.rows_per_table,
        batch_size=settings.batch,
        rank=rank,
        world_size=settings.ranks,
    )
    batches: list[Batch] = []
    while len(batches) < settings.steps:
        for batch in dataset:
            batches.append(batch)
            if len(batches) == settings.steps:
                break
    return batches


def draw_delays(settings: Settings) -> npt.NDArray[np.float64]:
    """Draws (ranks, steps) delays in seconds, the same for every run (paper, sec. V-E2)."""
    random = np.random.default_rng([settings.seed, DELAY_STREAM])
    delays = random.uniform(0, settings.max_delay, (settings.ranks, settings.steps))
    if settings.straggler is not None:
        delays[settings.straggler] *= 2
    return delays

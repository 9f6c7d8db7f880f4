"""The sets of samples of the study, each in Criteo's shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import torch

from torchrec_bls.datasets import CriteoDataset, capped_cardinalities
from torchrec_bls.datasets.movielens import movielens_clicks
from torchrec_bls.datasets.planted import Clicks, PlantedClicks

_MODEL_SEED = 0
_TEST_SEED = 1_000_000
_READ_ROWS = 4096


@dataclass(frozen=True)
class Source:
    """Where samples come from, and how many of them are used."""

    name: str  # "planted", "ml-100k", or the name of a Criteo file
    iterations: int  # of training at most
    batch_size: int  # of all nodes together
    test_rows: int  # of the planted model; real rows have a share for tests
    table_rows: int  # of a table at most, for hashed and generated ids
    path: Path | None = None  # of the real rows

    @property
    def train_rows(self) -> int:
        """Of training at most."""
        return self.iterations * self.batch_size


@dataclass(frozen=True)
class Split:
    """What a run trains on, in order, what it is tested on, and the rows of the 26 tables."""

    train: Clicks
    test: Clicks
    rows_per_table: Sequence[int]


# Cells of one seed follow each other.
@lru_cache(maxsize=1)
def load(source: Source, seed: int) -> Split:
    if source.path is not None:
        if source.path.is_dir():
            return Split(*movielens_clicks(source.path, source.train_rows, seed))
        return criteo(source)
    rows_per_table = capped_cardinalities(source.table_rows)
    model = PlantedClicks(rows_per_table, seed=_MODEL_SEED)
    train = model.draw(source.train_rows, seed=seed)
    return Split(train, model.draw(source.test_rows, seed=_TEST_SEED), rows_per_table)


def criteo(source: Source) -> Split:
    """Reads the start of a Criteo file: whole batches of training rows, as far as the file has
    them, and behind them a sixth as many to test on, as the last of the challenge's seven days."""
    rows_per_table = capped_cardinalities(source.table_rows)
    wanted = -(-source.train_rows * 7 // 6)
    dataset = CriteoDataset(source.path, rows_per_table=rows_per_table, batch_size=_READ_ROWS)
    batches = list(islice(dataset, -(-wanted // _READ_ROWS)))
    tables = len(rows_per_table)
    dense = torch.cat([batch.dense_features for batch in batches])
    ids = torch.cat([batch.sparse_features.values().view(tables, -1).T for batch in batches])
    labels = torch.cat([batch.labels for batch in batches]).float()
    clicks = Clicks(dense.numpy(), ids.numpy(), labels.numpy()).rows(0, wanted)
    train = min(source.train_rows, len(clicks) * 6 // 7)
    train -= train % source.batch_size
    return Split(clicks.rows(0, train), clicks.rows(train, len(clicks)), rows_per_table)

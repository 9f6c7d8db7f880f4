"""The sets of samples of the study, each in Criteo's shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from benchmarks.quantized.criteo_clicks import criteo_clicks
from benchmarks.quantized.movielens import movielens_clicks
from benchmarks.quantized.planted_clicks import Clicks, PlantedClicks
from torchrec_bls.datasets import capped_cardinalities

_MODEL_SEED = 0
_TEST_SEED = 1_000_000


@dataclass(frozen=True)
class Source:
    """Where samples come from, and how many of them are used."""

    name: str  # "planted", "ml-100k", or the name of a Criteo file
    iterations: int  # of training at most
    batch_size: int  # of all nodes together
    test_rows: int  # of the planted model; real rows have a share for tests
    table_rows: int  # of a table at most, for hashed and generated ids
    path: Path | None = None  # of the real rows
    own_tests: bool = False  # whether each seed is tested on other samples of the planted model

    @property
    def train_rows(self) -> int:
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
    rows_per_table = capped_cardinalities(source.table_rows)
    if source.path is not None:
        if source.path.is_dir():
            return Split(*movielens_clicks(source.path, source.train_rows, seed))
        rows = (source.train_rows, source.batch_size)
        return Split(*criteo_clicks(source.path, *rows, rows_per_table), rows_per_table)
    model = PlantedClicks(rows_per_table, seed=_MODEL_SEED)
    train = model.draw(source.train_rows, seed=seed)
    test_seed = _TEST_SEED + seed * source.own_tests
    return Split(train, model.draw(source.test_rows, seed=test_seed), rows_per_table)

"""The sets of samples of the study, each in Criteo's shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from torchrec_bls.datasets import DENSE_FEATURES, CriteoDataset, capped_cardinalities
from torchrec_bls.datasets.planted import Clicks, PlantedClicks

_MODEL_SEED = 0
_TEST_SEED = 1_000_000
_LIKED = 4
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
        return movielens(source, seed) if source.path.is_dir() else criteo(source)
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


def movielens(source: Source, seed: int) -> Split:
    """Reads MovieLens 100K as clicks: a user clicks what he rates with 4 or 5.

    The 26 categories are user, movie, gender, occupation, the two first digits of the zip code,
    decade of age, year of the movie, and its 19 genres; the dense features age, age of the movie,
    and how many ratings of the training user and movie have, and zeros. A fifth of the ratings, the
    same for all seeds, is for tests; the training is shuffled by the seed and goes over the others
    as often as the source says.
    """
    users, movies, ratings = (
        np.loadtxt(f"{source.path}/ml-100k.{kind}", str, comments=None, delimiter="\t", skiprows=1)
        for kind in ("user", "item", "inter")
    )
    ratings = np.random.default_rng(_TEST_SEED).permutation(ratings[:, :3].astype(int))
    test_rows = len(ratings) // 5
    # Users and movies count from 1, in the order of their files.
    user, movie = ratings[:, 0] - 1, ratings[:, 1] - 1
    ages = users[:, 1].astype(int)
    # Of one movie the year is unknown.
    years = np.array([int(year) if year.isdigit() else 0 for year in movies[:, 2]])
    genres = [set(names.split()) for names in movies[:, 3]]
    names = sorted(set().union(*genres))
    of_users = (users[:, 2], users[:, 3], users[:, 4].astype("U2"), ages // 10)
    of_movies = (years, *([name in own for own in genres] for name in names))
    ids = np.stack(
        [user, movie]
        + [np.unique(values, return_inverse=True)[1][user] for values in of_users]
        + [np.unique(values, return_inverse=True)[1][movie] for values in of_movies],
        axis=1,
    )
    dense = np.zeros((len(ratings), DENSE_FEATURES), dtype=np.float32)
    dense[:, 0] = np.log1p(ages)[user]
    dense[:, 1] = np.log1p(np.clip(1998 - years, 0, 100))[movie]
    dense[:, 2] = np.log1p(np.bincount(user[test_rows:], minlength=len(users)))[user]
    dense[:, 3] = np.log1p(np.bincount(movie[test_rows:], minlength=len(movies)))[movie]
    # As large as Criteo's, with which the learning rate goes together.
    dense[:, :4] /= dense[:, :4].mean(axis=0) * 2
    labels = (ratings[:, 2] >= _LIKED).astype(np.float32)
    order = np.random.default_rng(seed).permutation(np.arange(test_rows, len(ratings)))
    order = np.resize(order, source.train_rows)
    train, test = (
        Clicks(dense[rows], ids[rows], labels[rows]) for rows in (order, slice(test_rows))
    )
    largest = np.maximum(train.ids.max(axis=0), test.ids.max(axis=0))
    return Split(train, test, (largest + 1).tolist())

"""The sets of samples of the study, each in Criteo's shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchrec_bls.datasets import DENSE_FEATURES, CriteoDataset
from torchrec_bls.datasets.planted import Clicks, PlantedClicks

_MODEL_SEED = 0
_TEST_SEED = 1_000_000
_LIKED = 4
_GENRES = 19
_READ_ROWS = 4096


@dataclass(frozen=True)
class Split:
    """What a run trains on, in order, and what it is tested on."""

    train: Clicks
    test: Clicks


def planted(rows_per_table: Sequence[int], *, train_rows: int, test_rows: int, seed: int) -> Split:
    """Draws from one planted model: the test is the same for all seeds, the training is not."""
    model = PlantedClicks(rows_per_table, seed=_MODEL_SEED)
    return Split(model.draw(train_rows, seed=seed), model.draw(test_rows, seed=_TEST_SEED))


def criteo(path: Path, rows_per_table: Sequence[int], *, train_rows: int, batch_size: int) -> Split:
    """Reads the start of a Criteo file: whole batches of training rows, as far as the file has
    them, and behind them a sixth as many to test on, as the last of the challenge's seven days."""
    wanted = -(-train_rows * 7 // 6)
    # Memory is taken for what is written only, so that a shorter file takes less.
    clicks = Clicks(
        np.empty((wanted, DENSE_FEATURES), dtype=np.float32),
        np.empty((wanted, len(rows_per_table)), dtype=np.int64),
        np.empty(wanted, dtype=np.float32),
    )
    held = 0
    for batch in CriteoDataset(path, rows_per_table=rows_per_table, batch_size=_READ_ROWS):
        into = clicks.rows(held, min(held + len(batch.labels), wanted))
        ids = batch.sparse_features.values().view(len(rows_per_table), -1).T
        into.dense[:] = batch.dense_features.numpy()[: len(into)]
        into.ids[:] = ids.numpy()[: len(into)]
        into.labels[:] = batch.labels.numpy()[: len(into)]
        held += len(into)
        if held >= wanted:
            break
    clicks = clicks.rows(0, held)
    train = min(train_rows, len(clicks) * 6 // 7) // batch_size * batch_size
    return Split(clicks.rows(0, train), clicks.rows(train, len(clicks)))


def movielens(folder: Path, *, train_rows: int, batch_size: int, seed: int) -> Split:
    """Reads MovieLens 100K as clicks: a user clicks what he rates with 4 or 5.

    The 26 categories are user, movie, gender, occupation, the two first digits of the zip code,
    decade of age, year of the movie, and its 19 genres; the dense features age, age of the movie,
    and how many ratings of the training user and movie have, and zeros. A fifth of the ratings, the
    same for all seeds, is for tests; the training is shuffled by the seed and goes over the others
    as often as `train_rows` says.
    """
    users = _read(folder / "ml-100k.user")
    movies = _read(folder / "ml-100k.item")
    ratings = np.array(_read(folder / "ml-100k.inter"), dtype=np.float64).astype(np.int64)
    ratings = ratings[np.random.default_rng(_TEST_SEED).permutation(len(ratings))]
    test_rows = len(ratings) // 5
    of_users = {int(row[0]): row for row in users}
    of_movies = {int(row[0]): row for row in movies}
    user, movie = ratings[:, 0], ratings[:, 1]
    columns = [_numbered(user), _numbered(movie)]
    for value in (
        lambda row: row[2],
        lambda row: row[3],
        lambda row: row[4][:2],
        lambda row: int(row[1]) // 10,
    ):
        columns.append(_numbered([str(value(of_users[u])) for u in user]))
    # Of one movie the year is unknown.
    years = np.array([int(of_movies[m][2]) if of_movies[m][2].isdigit() else 0 for m in movie])
    columns.append(_numbered(years))
    genres = [set(of_movies[m][3].split()) for m in movie]
    names = sorted(set().union(*genres))[:_GENRES]
    columns += [np.array([name in own for own in genres], dtype=np.int64) for name in names]
    ids = np.stack(columns, axis=1)
    dense = np.zeros((len(ratings), DENSE_FEATURES), dtype=np.float32)
    dense[:, 0] = np.log1p([int(of_users[u][1]) for u in user])
    dense[:, 1] = np.log1p(np.clip(1998 - years, 0, 100))
    for place, of_rating in ((2, columns[0]), (3, columns[1])):
        counts = np.bincount(of_rating[test_rows:], minlength=of_rating.max() + 1)
        dense[:, place] = np.log1p(counts[of_rating])
    # As large as Criteo's, with which the learning rate goes together.
    dense[:, :4] /= dense[:, :4].mean(axis=0) * 2
    clicks = Clicks(dense, ids, (ratings[:, 2] >= _LIKED).astype(np.float32))
    order = np.random.default_rng(seed).permutation(np.arange(test_rows, len(clicks)))
    order = np.resize(order, train_rows // batch_size * batch_size)
    train = Clicks(dense[order], ids[order], clicks.labels[order])
    return Split(train, clicks.rows(0, test_rows))


def rows_of(clicks: Clicks) -> list[int]:
    """Returns the rows that tables need for these ids."""
    return [int(largest) + 1 for largest in clicks.ids.max(axis=0)]


def _read(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8") as lines:
        next(lines)
        return [line.rstrip("\n").split("\t") for line in lines]


def _numbered(values: Sequence[object] | np.ndarray) -> np.ndarray:
    return np.unique(values, return_inverse=True)[1].reshape(-1)

"""MovieLens 100K as clicks in Criteo's shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.quantized.planted_clicks import Clicks
from torchrec_bls.datasets.criteo_shape import DENSE_FEATURES

_LIKED = 4
_TEST_SHARE = 5
_TEST_SEED = 1_000_000
_YEAR_OF_RATINGS = 1998


def movielens_clicks(folder: Path, train_rows: int, seed: int) -> tuple[Clicks, Clicks, list[int]]:
    """Reads ratings as clicks: a user clicks on the movies that he rates with 4 or 5.

    The 26 categories are user, movie, gender, occupation, the first two digits of the zip code,
    decade of age, year of the movie, and its 19 genres. The dense features are age, age of the
    movie, and how many ratings in the training the user and the movie have; the rest are zeros. A
    fifth of the ratings, the same for all seeds, is for tests.

    Args:
        folder: folder with RecBole's atomic files: ml-100k.user, ml-100k.item and ml-100k.inter,
            with tabs.
        train_rows: number of rows for training. Ratings that are not for tests are repeated until
            there are so many.
        seed: seed of the ratings' order.

    Returns:
        Clicks for training and for tests, and the rows that each of the 26 tables needs.

    Raises:
        FileNotFoundError: a file is missing.
    """
    users, movies, ratings = (
        np.loadtxt(folder / f"ml-100k.{kind}", str, comments=None, delimiter="\t", skiprows=1)
        for kind in ("user", "item", "inter")
    )
    ratings = np.random.default_rng(_TEST_SEED).permutation(ratings[:, :3].astype(int))
    test_rows = len(ratings) // _TEST_SHARE
    # Users and movies count from 1, in the order of their files.
    user, movie = ratings[:, 0] - 1, ratings[:, 1] - 1
    ages = users[:, 1].astype(int)
    # The year of one movie is unknown.
    years = np.array([int(year) if year.isdigit() else 0 for year in movies[:, 2]])
    genres = [set(names.split()) for names in movies[:, 3]]
    names = sorted(set().union(*genres))
    of_users = (users[:, 2], users[:, 3], users[:, 4].astype("U2"), ages // 10)
    of_movies = (years, *(np.array([name in own for own in genres]) for name in names))
    ids = np.stack(
        [user, movie]
        + [np.unique(values, return_inverse=True)[1][user] for values in of_users]
        + [np.unique(values, return_inverse=True)[1][movie] for values in of_movies],
        axis=1,
    )
    dense = np.zeros((len(ratings), DENSE_FEATURES), dtype=np.float32)
    dense[:, 0] = np.log1p(ages)[user]
    dense[:, 1] = np.log1p(np.clip(_YEAR_OF_RATINGS - years, 0, 100))[movie]
    dense[:, 2] = np.log1p(np.bincount(user[test_rows:], minlength=len(users)))[user]
    dense[:, 3] = np.log1p(np.bincount(movie[test_rows:], minlength=len(movies)))[movie]
    # Values as large as Criteo's, which the learning rate suits.
    dense[:, :4] /= dense[:, :4].mean(axis=0) * 2
    labels = (ratings[:, 2] >= _LIKED).astype(np.float32)
    order = np.random.default_rng(seed).permutation(np.arange(test_rows, len(ratings)))
    order = np.resize(order, train_rows)
    train, test = (
        Clicks(dense[rows], ids[rows], labels[rows]) for rows in (order, slice(test_rows))
    )
    largest = np.maximum(train.ids.max(axis=0), test.ids.max(axis=0))
    return train, test, (largest + 1).tolist()

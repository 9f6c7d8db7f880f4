"""Requests and their arrivals, drawn from a seed."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.serve import shape


@dataclass(frozen=True)
class Request:
    """What one caller wants to be ranked: B candidates.

    Attributes:
        dense: [B, 13] float32.
        values: [26 * B] int64, ids in the order of the keys, of a key in that of the candidates.
        lengths: [26 * B] int32, how many ids each key and candidate has.
    """

    dense: npt.NDArray[np.float32]
    values: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]


def requests(count: int, rows: int = shape.ROWS, seed: int = 0) -> Iterator[Request]:
    """Requests with one id for each key and candidate, by Zipf's law over the rows of a table.

    The popular ids are scattered over the table, as hashing does.
    """
    random = np.random.default_rng([seed, 0])
    shares = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -shape.ZIPF_EXPONENT)
    shares /= shares[-1]
    by_popularity = random.permutation(rows)
    for _ in range(count):
        drawn = random.lognormal(np.log(shape.MEDIAN_CANDIDATES), shape.SIGMA)
        candidates = int(np.clip(np.rint(drawn), 1, shape.MOST_CANDIDATES))
        ids = shape.TABLES * candidates
        yield Request(
            random.random((candidates, shape.DENSE), dtype=np.float32),
            by_popularity[np.searchsorted(shares, random.random(ids), side="right")],
            np.ones(ids, dtype=np.int32),
        )


def arrivals(rate: float, seconds: float, seed: int = 0) -> npt.NDArray[np.float64]:
    """Moments of a Poisson process of `rate` a second, in seconds from the begin, sorted."""
    random = np.random.default_rng([seed, 1])
    return np.sort(random.uniform(0, seconds, random.poisson(rate * seconds)))

"""Functions that show when shards are too large to be packed, although their sum is not.

A function f is dual feasible if numbers whose sum is at most 1 have images whose sum is at most 1.
Take shards as shares of the room of a rank. If the sum of their images is larger than the number of
ranks, no placement has room. (Fekete and Schepers, New classes of fast lower bounds for bin packing
problems, Mathematical Programming 91, 2001.)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

# A shard below such a share counts as nothing; one that leaves less than it counts as a whole rank.
_SMALL = (1 / 2, 0.4, 1 / 3, 1 / 4, 0.2, 0.15, 0.1, 0.05, 0.02)
# Shards count in steps of one k-th.
_STEPS = (1, 2, 3, 4, 5, 7)
_ROUNDING = 1e-9


def dual_feasible(shares: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
    """Yields the images of `shares` under each function, of the same shape, between 0 and 1."""
    for small in _SMALL:
        large = shares > 1 - small + _ROUNDING
        yield np.where(large, 1.0, np.where(shares < small, 0.0, shares))
    for steps in _STEPS:
        scaled = (steps + 1) * shares
        # Rounding must not add a step to a whole number of steps.
        whole = np.abs(scaled - np.round(scaled)) < _ROUNDING * (steps + 1)
        yield np.where(whole, shares, np.floor(scaled) / steps)

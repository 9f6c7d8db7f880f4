"""Intervals from held-out errors."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

#: The share of measurements that an interval is to hold.
COVERAGE = 0.9


def interval_log(errors: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Returns the interval of log(measured / predicted) of 9 of 10 further measurements.

    Each end is a quantile of held-out errors, a little further out than the 5th or 95th percentile.
    So the interval holds with only n errors, too (split conformal prediction). 0 is always inside.

    Args:
        errors: (n,) logarithms of measured / predicted on held-out measurements, n >= 1.

    Returns:
        (low, high), low <= 0 <= high.
    """
    n = len(errors)
    ordered = np.sort(errors)
    beyond = max(1, math.floor((1 - COVERAGE) / 2 * (n + 1)))
    return min(float(ordered[beyond - 1]), 0.0), max(float(ordered[n - beyond]), 0.0)

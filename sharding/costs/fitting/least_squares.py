"""Least squares of relative errors, with coefficients that can't be negative."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

Floats = npt.NDArray[np.float64]

# So often are the weights computed anew.
_ROUNDS = 5


def nonnegative(matrix: Floats, target: Floats) -> Floats:
    """Returns the x >= 0, (k,), that minimizes |matrix x - target|; matrix is (n, k), target (n,).

    Columns may differ by many orders of magnitude. So each column is first scaled to length 1.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    x: Floats = nnls(matrix / scale, target)[0] / scale
    return x


def nonnegative_relative(
    matrix: Floats, measured: Floats, *, long_ones_more: bool = False
) -> Floats:
    """Fits matrix x = measured for x >= 0 by relative error, with less weight on outliers.

    Errors beyond 1.5 times their typical size (median absolute deviation) count linearly (Huber).

    Args:
        matrix: (n, k) float64.
        measured: (n,) float64, positive.
        long_ones_more: whether relative errors count in proportion to the root of what was
            measured. Otherwise all count alike.

    Returns:
        x, (k,) float64.
    """
    relative, ones = matrix / measured[:, None], np.ones(len(measured))
    root = np.sqrt(measured) if long_ones_more else ones
    x = nonnegative(relative * root[:, None], root)
    for _ in range(_ROUNDS):
        error = np.abs(relative @ x - 1.0)
        limit = max(1.5 * 1.4826 * float(np.median(error)), 1e-9)
        weight = root * np.sqrt(np.minimum(1.0, limit / np.maximum(error, limit)))
        x = nonnegative(relative * weight[:, None], weight)
    return x

"""Least squares with coefficients that can't be negative, of relative errors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def nonnegative(matrix: Floats, target: Floats, sweeps: int = 2000) -> Floats:
    """Minimizes |matrix x - target| over x >= 0, one coordinate after the other.

    Args:
        matrix: (n, k) float64.
        target: (n,) float64.
        sweeps: how often at most each coordinate is set.

    Returns:
        x, (k,) float64.
    """
    scale = np.sqrt((matrix**2).sum(axis=0))
    scale[scale == 0] = 1.0
    columns = matrix / scale
    gram, projected = columns.T @ columns, columns.T @ target
    x = np.zeros(matrix.shape[1])
    for _ in range(sweeps):
        largest_change = 0.0
        for k in range(len(x)):
            if gram[k, k] == 0:
                continue
            moved = max(0.0, x[k] + (projected[k] - gram[k] @ x) / gram[k, k])
            largest_change = max(largest_change, abs(moved - x[k]))
            x[k] = moved
        if largest_change < 1e-10:
            break
    result: Floats = x / scale
    return result


def nonnegative_relative(matrix: Floats, measured: Floats, rounds: int = 5) -> Floats:
    """Fits matrix x = measured for x >= 0 by relative error, with less weight on outliers.

    Errors beyond 1.5 times their typical size (median absolute deviation) count linearly (Huber).

    Args:
        matrix: (n, k) float64.
        measured: (n,) float64, positive.
        rounds: how often the weights are set anew.

    Returns:
        x, (k,) float64.
    """
    relative, ones = matrix / measured[:, None], np.ones(len(measured))
    x = nonnegative(relative, ones)
    for _ in range(rounds):
        error = np.abs(relative @ x - 1.0)
        limit = max(1.5 * 1.4826 * float(np.median(error)), 1e-9)
        weight = np.sqrt(np.minimum(1.0, limit / np.maximum(error, limit)))
        x = nonnegative(relative * weight[:, None], ones * weight)
    return x

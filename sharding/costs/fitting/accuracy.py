"""How far predictions are from measurements."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# A single perfect prediction would otherwise make a geometric mean 0.
_SMALLEST_ERROR = 1e-4


def gmae_percent(predicted: Floats, measured: Floats) -> float:
    """Returns the geometric mean of the absolute relative errors, per cent (the performance paper's
    GMAE)."""
    errors = np.maximum(np.abs(predicted / measured - 1.0), _SMALLEST_ERROR)
    return float(100 * np.exp(np.log(errors).mean()))


def mape_percent(predicted: Floats, measured: Floats) -> float:
    """Returns the arithmetic mean of the absolute relative errors, per cent."""
    return float(100 * np.abs(predicted / measured - 1.0).mean())


def bias_percent(predicted: Floats, measured: Floats) -> float:
    """Returns the mean of the signed relative errors, per cent: below 0, predictions are too
    low."""
    return float(100 * (predicted / measured - 1.0).mean())

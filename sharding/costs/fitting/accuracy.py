"""How far predictions are from measurements."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# A single perfect prediction would otherwise make a geometric mean 0.
_SMALLEST_ERROR = 1e-4


def gmae_percent(predicted: Floats, measured: Floats) -> float:
    """Geometric mean of the absolute relative errors (the performance paper's GMAE), per cent."""
    errors = np.maximum(np.abs(predicted / measured - 1.0), _SMALLEST_ERROR)
    return float(100 * np.exp(np.log(errors).mean()))


def mape_percent(predicted: Floats, measured: Floats) -> float:
    """Arithmetic mean of the absolute relative errors, per cent."""
    return float(100 * np.abs(predicted / measured - 1.0).mean())


def bias_percent(predicted: Floats, measured: Floats) -> float:
    """Mean of the relative errors with their sign, per cent: below 0 is predicted too low."""
    return float(100 * (predicted / measured - 1.0).mean())

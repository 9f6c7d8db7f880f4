"""Intervals of drawn numbers."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Percentiles of an interval's ends: nine of ten draws are inside.
_ENDS = (5.0, 50.0, 95.0)


@dataclass(frozen=True)
class Interval:
    """A median, and the two numbers between which nine of ten draws are."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, draws: Floats) -> "Interval":
        """Returns the interval of (n,) draws."""
        return cls(*(float(each) for each in np.percentile(draws, _ENDS)))

"""Which of several repeats counts as the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def undisturbed_us(repeats: Sequence[float]) -> float:
    """Returns the tenth percentile: the time of a call that nothing disturbs.

    On shared cores the scheduler sometimes wakes ranks late. A collective then takes up to three
    times as long. The share of such collectives changes from minute to minute, which no model can
    predict.
    """
    return float(np.quantile(repeats, 0.1))


def typical_us(repeats: Sequence[float]) -> float:
    """Returns the geometric mean: the time on a host where nearly every call is disturbed."""
    return float(np.exp(np.log(repeats).mean()))


#: What may count as the time of a lookup, by the name that a profile has of it.
LOOKUP_TIMES: dict[str, Callable[[Sequence[float]], float]] = {
    "tenth percentile": undisturbed_us,
    "geometric mean": typical_us,
}

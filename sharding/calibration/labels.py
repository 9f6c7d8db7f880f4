"""Which of several repeats counts as the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def lookup_us(entry: dict[str, Any], direction: str) -> float:
    """The time of a measured lookup: the geometric mean of all repeats of all visits.

    Of the usual choices it is the one that two calibrations of the same agree on best. The least is
    a quieter machine's, but a single lucky repeat decides it, and the shorter the lookup the
    luckier.

    Args:
        entry: of `LookupTimer.measure`.
        direction: "forward" or "backward".
    """
    return float(np.exp(np.log(entry[f"{direction}_us"]).mean()))


def collective_us(samples: Sequence[float]) -> float:
    """The time of a collective that nothing disturbs: a tenth of the samples are faster.

    On shared cores the scheduler sometimes wakes ranks late, and a sample then takes up to three
    times as long. How many of them do changes from minute to minute, which no model can predict.
    """
    return float(np.quantile(samples, 0.1))

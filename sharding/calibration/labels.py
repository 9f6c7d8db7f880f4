"""Which of several repeats counts as the time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def lookup_us(entry: dict[str, Any], direction: str) -> float:
    """The time of a measured lookup: the least, since nothing makes a computation faster by chance.

    Args:
        entry: of `LookupTimer.measure`.
        direction: "forward" or "backward".
    """
    return float(min(entry[f"{direction}_us"]))


def collective_us(samples: Sequence[float]) -> float:
    """The time of a collective: the median, since waking up is a part of it and varies."""
    return float(statistics.median(samples))

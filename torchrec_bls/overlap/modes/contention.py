"""How all-reduces and the backward beside them slow each other down (LIBRA, section III)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

_OF_ALL_REDUCES = (
    *("startup_us", "alone_us_per_byte"),
    *("overlapped_us_per_byte", "added_startup_us"),
)


@dataclass(frozen=True)
class ModeTimes:
    """The parameters of one mode: Eqs. 3, 5 and 6 for one allocation of the host or device.

    Attributes:
        startup_us: microseconds of each all-reduce (a in Eq. 3).
        alone_us_per_byte: microseconds of a byte of gradients without a backward (q in section
            III-A).
        overlapped_us_per_byte: the same beside a backward (p in Eq. 6).
        compute_rate: speed of a backward beside the bytes, as a share of its speed alone (Eq. 5's
            denominator).
        added_startup_us: microseconds more of each all-reduce beside a backward, since threads wake
            up late on busy cores; the paper has none.
        added_compute_us: microseconds of the backward done in each startup, beyond those at
            `compute_rate`. An all-reduce that waits for threads takes less of the cores than one
            that sends. The paper has none.
    """

    startup_us: float
    alone_us_per_byte: float
    overlapped_us_per_byte: float
    compute_rate: float
    added_startup_us: float = 0.0
    added_compute_us: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for times that are impossible."""
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}, but must be finite and not negative")
        if not self.compute_rate:
            raise ValueError("compute_rate is 0, but a backward must go on")

    def alone_us(self, size: float) -> float:
        """Returns the time of an all-reduce of so many bytes right behind another one, without a
        backward beside it."""
        return self.startup_us + size * self.alone_us_per_byte

    def overlapped_us(self, size: float) -> float:
        """Returns the time of an all-reduce of so many bytes right behind another one, all beside a
        backward."""
        return self.startup_us + self.added_startup_us + size * self.overlapped_us_per_byte

    def slower(self, factor: float) -> ModeTimes:
        """Returns times of all-reduces that take so many times as long, with all else as it is."""
        longer = {name: factor * getattr(self, name) for name in _OF_ALL_REDUCES}
        return replace(self, **longer)

    def rate(self, size: float) -> float:
        """Returns the mean speed of a backward beside an all-reduce of so many bytes."""
        us = self.overlapped_us(size)
        return self.compute_rate + (self.added_compute_us / us if us else 0.0)


@dataclass(frozen=True)
class Stage:
    """An all-reduce and the backward beside it, microseconds (Eqs. 8 to 11).

    Attributes:
        overlap_us: microseconds while both run.
        communication_us: microseconds of the all-reduce after the backward's end.
        compute_left_us: microseconds of the backward, alone, after the all-reduce's end.
    """

    overlap_us: float
    communication_us: float
    compute_left_us: float


def stage(times: ModeTimes, size: float, compute_us: float) -> Stage:
    """Returns the course of an all-reduce of `size` bytes beside `compute_us` of backward.

    Each of the two has one speed from begin to end (section III-B). Without bytes nothing is sent,
    and there is no startup (Eq. 8).
    """
    if not size:
        return Stage(0.0, 0.0, compute_us)
    together, alone = times.overlapped_us(size), times.alone_us(size)
    rate = times.rate(size)
    slowed = compute_us / rate
    if together <= slowed:
        return Stage(together, 0.0, compute_us - together * rate)
    return Stage(slowed, alone * (1 - slowed / together), 0.0)

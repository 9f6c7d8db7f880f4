"""What an all-reduce and the backward beside it take from each other (LIBRA, section III)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModeTimes:
    """The parameters of one mode: Eqs. 3, 5 and 6 for one allocation of the host or device.

    Attributes:
        startup_us: of each all-reduce, alone or not (a in Eq. 3).
        alone_us_per_byte: of gradients, where no backward runs (q in section III-A).
        overlapped_us_per_byte: where one does (p in Eq. 6).
        compute_rate: of a backward under it, as a share of what it is alone (Eq. 5's denominator).
    """

    startup_us: float
    alone_us_per_byte: float
    overlapped_us_per_byte: float
    compute_rate: float

    def __post_init__(self) -> None:
        """Raises ValueError for times that no mode can have."""
        if self.startup_us < 0 or min(self.alone_us_per_byte, self.overlapped_us_per_byte) < 0:
            raise ValueError(f"times of a mode are not negative: {self}")
        if self.compute_rate <= 0:
            raise ValueError(f"a backward goes on at a rate above 0: {self}")


@dataclass(frozen=True)
class Mode:
    """A way for gradients to travel: by so many threads or channels of a library, or encoded.

    Attributes:
        name: of it, for people and for plans.
        times: fitted.
        draws: fitted to resampled measurements, from which intervals come; may be empty.
        changes_values: whether averages are other ones than those of float32: codecs.
    """

    name: str
    times: ModeTimes
    draws: tuple[ModeTimes, ...] = ()
    changes_values: bool = False


@dataclass(frozen=True)
class Stage:
    """An all-reduce and the backward beside it, microseconds (Eqs. 8 to 11).

    Attributes:
        overlap_us: while both run.
        communication_us: of the all-reduce, after the backward's end.
        compute_left_us: of the backward, alone, after the all-reduce's end.
    """

    overlap_us: float
    communication_us: float
    compute_left_us: float


def stage(times: ModeTimes, size: float, compute_us: float) -> Stage:
    """Returns what becomes of an all-reduce of `size` bytes beside `compute_us` of backward.

    Either goes on at its own pace, whatever part of it is done (section III-B). Without bytes
    nothing is sent, and no startup is due (Eq. 8).
    """
    if not size:
        return Stage(0.0, 0.0, compute_us)
    together = times.startup_us + size * times.overlapped_us_per_byte
    alone = times.startup_us + size * times.alone_us_per_byte
    slowed = compute_us / times.compute_rate
    if together <= slowed:
        return Stage(together, 0.0, compute_us - together * times.compute_rate)
    return Stage(slowed, alone * (1 - slowed / together), 0.0)

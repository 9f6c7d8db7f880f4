"""How all-reduces and the backward beside them slow each other down (LIBRA, section III)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from typing import Annotated, Any

from msgspec import Meta, structs

from torchrec_bls.records import Amount, Ranks, Record

_OF_ALL_REDUCES = (
    *("startup_us", "alone_us_per_byte", "overlapped_us_per_byte"),
    *("added_startup_us", "behind_us"),
)

#: Parameters that are the ranks' own, whatever travels: of several modes those of the first count.
RANKS_OWN_TIMES = ("behind_us", "wake_us", "cold_us", "hook_us")


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
        behind_us: microseconds more of the first all-reduce after a backward than of one right
            behind another one, once in all plans; the paper has none.
        wake_us: microseconds from when gradients are ready beside a backward until their all-reduce
            begins, if none runs: its thread waits for a core. The paper has none.
        cold_us: microseconds more of such an all-reduce than of one right behind another one. The
            backward goes on meanwhile. The paper has none.
        hook_us: microseconds more of a backward whose all-reduces another thread makes, as the hook
            of planned buckets does: that thread wakes up, and in the end the main thread.

    The last four are `RANKS_OWN_TIMES`.
    """

    startup_us: float
    alone_us_per_byte: float
    overlapped_us_per_byte: float
    compute_rate: float
    added_startup_us: float = 0.0
    added_compute_us: float = 0.0
    behind_us: float = 0.0
    wake_us: float = 0.0
    cold_us: float = 0.0
    hook_us: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for times that are impossible."""
        if not all(math.isfinite(number) for number in astuple(self)):
            raise ValueError(f"times of a mode are numbers: {self}")
        if min(astuple(self)) < 0:
            raise ValueError(f"times of a mode are not negative: {self}")
        if self.compute_rate <= 0:
            raise ValueError(f"a backward goes on at a rate above 0: {self}")

    @property
    def late_us(self) -> float:
        """Returns the microseconds by which an all-reduce beside a backward is late if none runs
        before."""
        return self.wake_us + self.cold_us

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
class Mode:
    """A way for gradients to travel: by a number of threads or channels of a library, or encoded.

    Attributes:
        name: name of the mode, for people and for plans.
        times: fitted times.
        draws: times fitted to resampled measurements, for intervals; may be empty.
        changes_values: whether averages differ from float32's, as codecs' do.
        channels: number of NCCL's channels, each with one CTA (`max_ctas`); None for other
            libraries.
        held_out_percent: mean of the absolute relative errors on sizes that nothing was fitted to;
            None if that was not measured.
    """

    name: str
    times: ModeTimes
    draws: tuple[ModeTimes, ...] = ()
    changes_values: bool = False
    channels: int | None = None
    held_out_percent: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for an impossible error."""
        error = self.held_out_percent
        if error is not None and not (math.isfinite(error) and error >= 0):
            raise ValueError(f"mode {self.name} has an error of {error} %")

    def as_json(self) -> dict[str, Any]:
        """Returns an object for the profile, with one list of draws for each parameter."""
        return {
            "name": self.name,
            "changes_values": self.changes_values,
            "channels": self.channels,
            "held_out_percent": self.held_out_percent,
            "times": asdict(self.times),
            "draws": {name: [getattr(draw, name) for draw in self.draws] for name in _PARAMETERS},
        }


_PARAMETERS = tuple(field.name for field in fields(ModeTimes))

#: (backend, world size) to the modes of such a group.
Overlap = dict[tuple[str, int], tuple[Mode, ...]]


def overlap_as_json(overlap: Overlap) -> list[dict[str, Any]]:
    """Returns objects for the profile, one for each backend and world size."""
    return [
        {"backend": backend, "world_size": ranks, "modes": [mode.as_json() for mode in modes]}
        for (backend, ranks), modes in overlap.items()
    ]


class _ModeRecord(Record):
    name: str
    changes_values: bool
    channels: int | None
    held_out_percent: Amount | None
    times: dict[str, Amount]
    draws: dict[str, list[Amount]]

    def __post_init__(self) -> None:
        for name in ("times", "draws"):
            given = getattr(self, name)
            if missing := sorted(set(_PARAMETERS) - set(RANKS_OWN_TIMES) - given.keys()):
                raise ValueError(f"{name} lack '{missing[0]}'")
            if unknown := sorted(given.keys() - set(_PARAMETERS)):
                raise ValueError(f"{name} have '{unknown[0]}', which is unknown")
        if len({len(drawn) for drawn in self.draws.values()}) > 1:
            raise ValueError("draws are not equally many of each parameter")
        if min((self.times["compute_rate"], *self.draws["compute_rate"])) <= 0:
            raise ValueError("compute_rate is 0, but a backward must go on")

    def mode(self) -> Mode:
        # Profiles of before do not have what is late: it is 0.
        names = list(self.draws)
        draws = zip(*self.draws.values(), strict=True)
        return Mode(
            **{
                **structs.asdict(self),
                "times": ModeTimes(**self.times),
                "draws": tuple(ModeTimes(**dict(zip(names, d, strict=True))) for d in draws),
            }
        )


class OverlapRecord(Record):
    """The modes of one backend and world size in a profile."""

    backend: str
    world_size: Ranks
    modes: Annotated[list[_ModeRecord], Meta(min_length=1)]

    def __post_init__(self) -> None:
        """Raises ValueError for two modes of one name."""
        names = [mode.name for mode in self.modes]
        if len(set(names)) < len(names):
            raise ValueError(f"modes have the names {names}, but each must have its own")


def overlap_of(records: Sequence[OverlapRecord]) -> Overlap:
    """Reads what `overlap_as_json` wrote.

    Raises:
        ValueError: a backend and world size are there twice.
    """
    overlap: Overlap = {}
    for record in records:
        key = record.backend, record.world_size
        if key in overlap:
            raise ValueError(f"two lists of modes of {key[0]} among {key[1]} ranks")
        overlap[key] = tuple(mode.mode() for mode in record.modes)
    return overlap


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

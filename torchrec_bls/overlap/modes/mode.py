"""Modes: ways for gradients to travel, in a profile's section "overlap"."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta, structs

from torchrec_bls.overlap.modes.contention import RANKS_OWN_TIMES, ModeTimes
from torchrec_bls.records import Amount, Ranks, Record, decode
from torchrec_bls.sharding.costs.profile import Profile, ProfileError


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


class _GroupRecord(Record):
    backend: str
    world_size: Ranks
    modes: Annotated[list[_ModeRecord], Meta(min_length=1)]

    def __post_init__(self) -> None:
        names = [mode.name for mode in self.modes]
        if len(set(names)) < len(names):
            raise ValueError(f"modes have the names {names}, but each must have its own")


class _Section(Record):
    overlap: list[_GroupRecord]

    def __post_init__(self) -> None:
        groups = Counter((each.backend, each.world_size) for each in self.overlap)
        for (backend, ranks), count in groups.items():
            if count > 1:
                raise ValueError(f"{count} lists of modes are of {backend} among {ranks} ranks")


def overlap_of(profile: Profile) -> Overlap:
    """Returns all modes of a profile.

    Raises:
        ProfileError: its section "overlap" is not as `with_modes` makes it.
    """
    section = msgspec.json.encode({"overlap": profile.overlap})
    groups = decode(section, _Section, f"profile {profile.name}", _CURE, ProfileError).overlap
    return {
        (each.backend, each.world_size): tuple(mode.mode() for mode in each.modes)
        for each in groups
    }


def with_modes(profile: Profile, added: Overlap) -> Profile:
    """Returns a profile with modes in place of those that it has of the same groups.

    Raises:
        ProfileError: see `overlap_of`.
    """
    groups = {**overlap_of(profile), **added}
    return replace(
        profile,
        overlap=tuple(
            {"backend": backend, "world_size": ranks, "modes": [mode.as_json() for mode in modes]}
            for (backend, ranks), modes in groups.items()
        ),
    )


def modes_of(profile: Profile, backend: str, ranks: int) -> tuple[Mode, ...]:
    """Returns the ways in which gradients may travel beside the backward.

    Args:
        profile: a profile with an overlap.
        backend: backend of the gradients' group, "gloo" or "bls".
        ranks: world size of that group.

    Raises:
        ProfileError: no such group was measured, or see `overlap_of`.
    """
    overlap = overlap_of(profile)
    if (backend, ranks) not in overlap:
        known = ", ".join(f"{name} among {count} ranks" for name, count in overlap)
        raise ProfileError(
            f"profile {profile.name} does not say how all-reduces of {backend} among {ranks} ranks"
            f" fare beside the backward, but of {known or 'no group at all'}: add it by"
            f" `torchrec-bls calibrate --overlap --out PROFILE --world-sizes {ranks}`, or, where"
            " ranks are on several hosts, by `torchrun --no-python torchrec-bls calibrate --overlap"
            " --out PROFILE` with torchrun's options for these"
        )
    return overlap[backend, ranks]


_CURE = "make it anew with `torchrec-bls calibrate --overlap`"

"""Modes: ways for gradients to travel, in a profile's section "overlap"."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import msgspec
from msgspec import Meta

from torchrec_bls.overlap.modes.contention import ModeTimes
from torchrec_bls.records import Ranks, Record, decode
from torchrec_bls.sharding.costs.profile import Profile, ProfileError

_CURE = (
    'remove its section "overlap", and measure it anew with `torchrec-bls calibrate --overlap '
    "--out PROFILE`"
)


@dataclass(frozen=True)
class Mode:
    """A way for gradients to travel: as float32, or encoded.

    Attributes:
        name: name of the mode, for people and for plans.
        times: fitted times.
        changes_values: whether averages differ from float32's, as codecs' do.
    """

    name: str
    times: ModeTimes
    changes_values: bool = False


#: (backend, world size) to the modes of such a group.
Overlap = dict[tuple[str, int], tuple[Mode, ...]]


class _GroupRecord(Record):
    backend: str
    world_size: Ranks
    # Modes of older profiles have more fields, which are passed over.
    modes: Annotated[tuple[Mode, ...], Meta(min_length=1)]

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
    groups = decode(section, _Section, str(profile), _CURE, ProfileError).overlap
    return {(each.backend, each.world_size): each.modes for each in groups}


def with_modes(profile: Profile, added: Overlap) -> Profile:
    """Returns a profile with modes in place of those that it has of the same groups.

    Raises:
        ProfileError: see `overlap_of`.
    """
    groups = {**overlap_of(profile), **added}
    return replace(
        profile,
        overlap=tuple(
            {"backend": backend, "world_size": ranks, "modes": [asdict(mode) for mode in modes]}
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
            f"{profile} does not say how all-reduces of {backend} among {ranks} ranks"
            f" fare beside the backward, but of {known or 'no group at all'}: add it by"
            f" `torchrec-bls calibrate --overlap --out PROFILE --world-sizes {ranks}`, or, where"
            " ranks are on several hosts, by `torchrun --no-python torchrec-bls calibrate --overlap"
            " --out PROFILE` with torchrun's options for these"
        )
    return overlap[backend, ranks]

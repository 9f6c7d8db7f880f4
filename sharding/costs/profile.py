"""The profile: everything that was measured of a machine, in one versioned JSON file."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchrec_bls.records import AboveZero, Amount, Format, Record, read_bytes

from .collective_model import CollectiveModel, CollectiveRecord
from .host_costs import HostModel, HostRecord
from .lookup.model import LookupModel, LookupRecord
from .machine import Machine

FORMAT = "torchrec-bls profile"
VERSION = 2
# Profiles of version 1 lack host costs; in some of version 2 collectives lack their work.
_READ = (1, 2)
KINDS = ("cpu",)
_MICROSECONDS = 1e6  # in a second


class ProfileError(ValueError):
    """A profile that can't be used. The message says which one, where the fault is, and what to
    do."""


@dataclass(frozen=True)
class MemoryCurve:
    """The speed of one thread's reading, by the size of what it reads.

    Attributes:
        buffer_bytes: (n,) float64, sizes of buffers, ascending.
        bytes_per_us: (n,) float64, speed of reading a buffer of that size from end to end.
        row_us: (n,) float64, time to gather one row of 256 bytes from anywhere in such a buffer.
    """

    buffer_bytes: npt.NDArray[np.float64]
    bytes_per_us: npt.NDArray[np.float64]
    row_us: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Profile:
    """The results of a calibration.

    Attributes:
        name: name of the machine, for people.
        measured_at: date, ISO 8601.
        machine: the machine that was measured.
        optimizer: FBGEMM's name of the optimizer that the backward includes.
        lookup_time: rule that makes a time of repeats: "tenth percentile" where the host disturbed
            little, else "geometric mean".
        lookups: model by (pooled, direction), with the direction "forward", "backward", or
            "by_exchange" for a forward that the exchange does (LookupWork.by_exchange), which
            older profiles lack.
        collectives: model by (operation, backend, world size), with the backend "gloo", "bls", or
            "tcp" for channels of bls over TCP, which older profiles lack. Some of these have
            "c10d", for channels over gloo's messages, which nothing asks for any more.
        memory: curve of one thread's memory.
        retest_percent: geometric mean of the absolute differences between two measurements of one
            thing, by name, such as "lookup_forward". No model can be more exact.
        hosts: costs of steps beside lookups and exchanges, by (backend, training, world size);
            empty if no steps were measured.
        overlap: JSON objects of torchrec_bls.overlap, which says what they mean: how gradients
            travel beside the backward; empty if that was not measured.
        source: file that it was read from, or name of the shipped one, for errors; empty if it was
            not read.
    """

    name: str
    measured_at: str
    machine: Machine
    optimizer: str
    lookup_time: str
    lookups: dict[tuple[bool, str], LookupModel]
    collectives: dict[tuple[str, str, int], CollectiveModel]
    memory: MemoryCurve
    retest_percent: dict[str, float]
    hosts: dict[tuple[str, bool, int], HostModel] = field(default_factory=dict)
    overlap: tuple[dict[str, Any], ...] = ()
    source: str = field(default="", compare=False)

    def __str__(self) -> str:
        """Returns what errors call it."""
        return f"profile {self.source or self.name}"

    def link(self, ranks: int) -> float:
        """Returns how many bytes a second each rank sends in an all-to-all of the backend "bls",
        for large messages. Start-up times are left out.

        Args:
            ranks: world size, one that was calibrated.

        Raises:
            ProfileError: the profile has no all-to-all among so many ranks.
        """
        if ranks not in (known := self.calibrated_ranks()):
            raise ProfileError(
                f"{self} has no all_to_all among {ranks} ranks: choose one of "
                f"{', '.join(map(str, known))}, which were calibrated"
            )
        return _MICROSECONDS / self.collectives["all_to_all", "bls", ranks].curve.us_per_byte

    def calibrated_ranks(self) -> list[int]:
        """Returns the world sizes that `link` knows, in ascending order.

        Raises:
            ProfileError: there are none.
        """
        known = sorted(
            ranks
            for operation, backend, ranks in self.collectives
            if (operation, backend) == ("all_to_all", "bls")
        )
        if not known:
            raise ProfileError(f"{self} has no all_to_all on backend 'bls': calibrate again")
        return known

    def save(self, path: Path) -> None:
        """Writes the JSON file, with each list of numbers on one line."""
        text = json.dumps(self.as_json(), indent=1, allow_nan=False)
        path.write_text(re.sub(r"\[[^\[\]{}]*\]", lambda m: " ".join(m[0].split()), text) + "\n")

    def as_json(self) -> dict[str, Any]:
        """Returns the file's content."""
        lookups: dict[str, dict[str, Any]] = {"pooled": {}, "unpooled": {}}
        for (pooled, direction), model in self.lookups.items():
            lookups["pooled" if pooled else "unpooled"][direction] = model.as_json()
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "measured_at": self.measured_at,
            "machine": self.machine.as_json(),
            "optimizer": self.optimizer,
            "lookup_time": self.lookup_time,
            "retest_percent": self.retest_percent,
            "memory": {
                "buffer_bytes": self.memory.buffer_bytes.tolist(),
                "bytes_per_us": self.memory.bytes_per_us.tolist(),
                "row_us": self.memory.row_us.tolist(),
            },
            "collectives": [model.as_json() for model in self.collectives.values()],
            "lookups": lookups,
            "hosts": [model.as_json() for model in self.hosts.values()],
            **({"overlap": list(self.overlap)} if self.overlap else {}),
        }


def load_profile(source: str | Path, *, kind: str = "cpu") -> Profile:
    """Reads a profile.

    Args:
        source: a file, or the name of a profile that ships with the package.
        kind: kind of the machine that the plan is for, "cpu".

    Raises:
        ProfileError: the file is no profile, is of another version or kind of machine, or has
            impossible numbers.
        OSError: the file can't be read.
    """
    path = Path(source)
    if path.suffix == ".json":
        data = read_bytes(path, error=ProfileError)
    else:
        shipped = resources.files(__package__) / "profiles" / f"{source}.json"
        if not shipped.is_file():
            raise ProfileError(
                f"no profile {source!r}: give a .json file of `torchrec-bls calibrate`, or the name"
                f" of one that ships: {', '.join(shipped_profiles())}"
            )
        data = shipped.read_bytes()
    return profile_from_json(data, str(source), kind=kind)


def shipped_profiles() -> list[str]:
    """Returns the names of the profiles that ship with the package."""
    folder = resources.files(__package__) / "profiles"
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith("json"))


def profile_from_json(text: str | bytes, source: str, *, kind: str = "cpu") -> Profile:
    """Reads the JSON of `Profile.as_json`; arguments and errors are those of `load_profile`."""
    record = _FILE.decode(text, f"profile {source}")
    try:
        profile = record.profile()
    except ValueError as error:
        raise ProfileError(f"profile {source}: {error}: {_CURE}") from error
    profile = replace(profile, source=source)
    check_kind(profile, kind)
    return profile


def check_kind(profile: Profile, kind: str) -> None:
    """Raises ProfileError for a profile of another kind of machine than the plan's.

    Args:
        profile: the profile to be used.
        kind: kind of the machine that the plan is for, "cpu" or "cuda".
    """
    if profile.machine.kind != kind:
        raise ProfileError(
            f"{profile} is of a machine of kind {profile.machine.kind!r},"
            f" and the plan is for {kind!r}: plan for a machine of that kind"
            " (Topology's compute_device), or pass costs of one of your own (AdditiveCosts), as"
            f" `torchrec-bls calibrate` measures {' and '.join(KINDS)} only"
        )


class _MemoryRecord(Record):
    buffer_bytes: list[AboveZero]
    bytes_per_us: list[AboveZero]
    row_us: list[AboveZero]

    def __post_init__(self) -> None:
        if not (np.diff(self.buffer_bytes) > 0).all():
            raise ValueError("buffer_bytes are not ascending")
        if not len(self.buffer_bytes) == len(self.bytes_per_us) == len(self.row_us):
            raise ValueError("buffer_bytes, bytes_per_us and row_us are not equally many")

    def curve(self) -> MemoryCurve:
        return MemoryCurve(
            np.array(self.buffer_bytes), np.array(self.bytes_per_us), np.array(self.row_us)
        )


_ByDirection = dict[Literal["forward", "backward", "by_exchange"], LookupRecord]


class _LookupsRecord(Record):
    pooled: _ByDirection
    unpooled: _ByDirection


class _ProfileRecord(Record):
    format: str
    version: int
    name: str
    measured_at: str
    machine: Machine
    optimizer: str
    lookup_time: str
    retest_percent: dict[str, Amount]
    memory: _MemoryRecord
    collectives: list[CollectiveRecord]
    lookups: _LookupsRecord
    hosts: tuple[HostRecord, ...] = ()
    # Times of dense layers, in profiles of before. Nothing reads them.
    dense: Any = None
    overlap: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        _check_once(
            "collectives", [(c.operation, c.backend, c.world_size) for c in self.collectives]
        )
        _check_once("hosts", [(h.backend, h.training, h.world_size) for h in self.hosts])

    def profile(self) -> Profile:
        lookups = {True: self.lookups.pooled, False: self.lookups.unpooled}
        collectives = [record.model() for record in self.collectives]
        hosts = [record.model() for record in self.hosts]
        return Profile(
            name=self.name,
            measured_at=self.measured_at,
            machine=self.machine,
            optimizer=self.optimizer,
            lookup_time=self.lookup_time,
            lookups={
                (pooled, direction): record.model()
                for pooled, records in lookups.items()
                for direction, record in records.items()
            },
            collectives={(c.operation, c.backend, c.world_size): c for c in collectives},
            memory=self.memory.curve(),
            retest_percent=self.retest_percent,
            hosts={(host.backend, host.training, host.world_size): host for host in hosts},
            overlap=self.overlap,
        )


def _check_once(what: str, keys: list[tuple[object, ...]]) -> None:
    twice = [key for key, count in Counter(keys).items() if count > 1]
    if twice:
        raise ValueError(f"{what} has {twice[0]} twice")


_CURE = "make one with `torchrec-bls calibrate`"
_FILE = Format(_ProfileRecord, _CURE, ProfileError, FORMAT, _READ)

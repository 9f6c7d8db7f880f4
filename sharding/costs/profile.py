"""The profile: everything that was measured of a machine, in one versioned JSON file."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .collective_model import CollectiveModel
from .contention import Mode, Overlap, overlap_as_json, overlap_from_json
from .dense.model import DenseModel
from .host_costs import HostModel
from .lookup.model import DIRECTIONS, LookupModel
from .machine import Machine

FORMAT = "torchrec-bls profile"
VERSION = 2
# Profiles of version 1 lack host costs; in some of version 2 collectives lack their work.
_READ = (1, 2)
KINDS = ("cpu",)


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
            "c10d" for channels of bls over TCP, which older profiles lack.
        memory: curve of one thread's memory.
        retest_percent: geometric mean of the absolute differences between two measurements of one
            thing, by name, such as "lookup_forward". No model can be more exact.
        hosts: costs of steps beside lookups and exchanges, by (backend, training, world size);
            empty if no steps were measured.
        dense: model of the ops of dense layers; None in profiles that were made without them.
        overlap: ways in which gradients travel beside the backward, by (backend, world size); empty
            if they were not measured.
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
    dense: DenseModel | None = None
    overlap: Overlap = field(default_factory=dict)

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
            **({"dense": self.dense.as_json()} if self.dense else {}),
            **({"overlap": overlap_as_json(self.overlap)} if self.overlap else {}),
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
        text = path.read_text()
    else:
        shipped = resources.files(__package__) / "profiles" / f"{source}.json"
        if not shipped.is_file():
            raise ProfileError(
                f"no profile {source!r}: give a .json file of `torchrec-bls calibrate`, or the name"
                f" of one that ships: {', '.join(shipped_profiles())}"
            )
        text = shipped.read_text()
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProfileError(f"profile {source} is no JSON: {error}") from error
    return profile_from_json(record, str(source), kind=kind)


def shipped_profiles() -> list[str]:
    """Returns the names of the profiles that ship with the package."""
    folder = resources.files(__package__) / "profiles"
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith("json"))


def profile_from_json(record: Any, source: str, *, kind: str = "cpu") -> Profile:
    """Reads what `Profile.as_json` wrote; arguments and errors are those of `load_profile`."""
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ProfileError(f"{source} is not a {FORMAT}: make one with `torchrec-bls calibrate`")
    if record.get("version") not in _READ:
        raise ProfileError(
            f"profile {source} has version {record.get('version')!r} and this package reads"
            f" {' and '.join(map(str, _READ))}: calibrate again"
        )
    try:
        profile = _parse(record)
    except KeyError as error:
        raise ProfileError(f"profile {source} lacks {error}: calibrate again") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise ProfileError(f"profile {source} is damaged: {error}") from error
    check_kind(profile, kind, source)
    return profile


def check_kind(profile: Profile, kind: str, source: str | None = None) -> None:
    """Raises ProfileError for a profile of another kind of machine than the plan's.

    Args:
        profile: the profile to be used.
        kind: kind of the machine that the plan is for, "cpu" or "cuda".
        source: name of the profile in the error; its own name by default.
    """
    if profile.machine.kind != kind:
        raise ProfileError(
            f"profile {source or profile.name} is of a machine of kind {profile.machine.kind!r},"
            f" and the plan is for {kind!r}: plan for a machine of that kind"
            " (Topology's compute_device), or pass costs of one of your own (AdditiveCosts), as"
            f" `torchrec-bls calibrate` measures {' and '.join(KINDS)} only"
        )


def modes_of(profile: Profile, backend: str, ranks: int) -> tuple[Mode, ...]:
    """Returns the ways in which gradients may travel beside the backward.

    Args:
        profile: a profile with an overlap.
        backend: backend of the gradients' group, "gloo" or "bls".
        ranks: world size of that group.

    Raises:
        ProfileError: no such group was measured.
    """
    if (backend, ranks) not in profile.overlap:
        known = ", ".join(f"{name} among {count} ranks" for name, count in profile.overlap)
        raise ProfileError(
            f"profile {profile.name} does not say how all-reduces of {backend} among {ranks} ranks"
            f" fare beside the backward, but of {known or 'no group at all'}: add it by"
            f" `torchrec-bls calibrate --overlap --out PROFILE --world-sizes {ranks}`, or, where"
            " ranks are on several hosts, by `torchrun --no-python torchrec-bls calibrate --overlap"
            " --out PROFILE` with torchrun's options for these"
        )
    return profile.overlap[backend, ranks]


def _parse(record: dict[str, Any]) -> Profile:
    lookups = {}
    for pooled, name in ((True, "pooled"), (False, "unpooled")):
        for direction, model in record["lookups"][name].items():
            if direction not in DIRECTIONS:
                raise ValueError(f"a lookup in direction {direction!r}")
            lookups[pooled, direction] = LookupModel.from_json(model)
    collectives = {}
    for entry in record["collectives"]:
        collective = CollectiveModel.from_json(entry)
        key = (collective.operation, collective.backend, collective.world_size)
        if key in collectives:
            raise ValueError(f"two models of {key}")
        collectives[key] = collective
    models = [HostModel.from_json(entry) for entry in record.get("hosts", [])]
    hosts = {(model.backend, model.training, model.world_size): model for model in models}
    if len(hosts) < len(models):
        raise ValueError("two host costs of one backend, kind and number of ranks")
    memory = MemoryCurve(*(_ascending_or_positive(record["memory"], name) for name in _MEMORY))
    retest = {str(name): float(value) for name, value in record["retest_percent"].items()}
    return Profile(
        name=str(record["name"]),
        measured_at=str(record["measured_at"]),
        machine=Machine(**record["machine"]),
        optimizer=str(record["optimizer"]),
        lookup_time=str(record["lookup_time"]),
        lookups=lookups,
        collectives=collectives,
        memory=memory,
        retest_percent=retest,
        hosts=hosts,
        dense=DenseModel.from_json(record["dense"]) if "dense" in record else None,
        overlap=overlap_from_json(record.get("overlap", [])),
    )


_MEMORY = ("buffer_bytes", "bytes_per_us", "row_us")


def _ascending_or_positive(record: dict[str, Any], name: str) -> npt.NDArray[np.float64]:
    numbers = np.asarray(record[name], dtype=np.float64)
    if numbers.ndim != 1 or not (np.isfinite(numbers).all() and (numbers > 0).all()):
        raise ValueError(f"memory's {name} are not positive numbers")
    if name == "buffer_bytes" and not (np.diff(numbers) > 0).all():
        raise ValueError("memory's buffer_bytes are not ascending")
    return numbers

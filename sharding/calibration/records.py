"""The measurements of a calibration, one JSON line each: a stopped calibration can go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchrec_bls.records import Format, decode, read_bytes

from ..costs.machine import Machine
from ..costs.profile import ProfileError
from .entries import Entry, Head, check_together

_FORMAT = "torchrec-bls measurements"
_VERSION = 1
_CURE = "remove the file"
_MOST_BYTES = 64 << 20  # read line by line
_HEAD = Format(Head, _CURE, ProfileError, _FORMAT, (_VERSION,))
_ENTRY: Any = Entry


class Records:
    """A file of measurements that grows.

    The first line says what is measured. An incomplete line, which a killed run has left, is
    dropped.

    Args:
        path: path of the file, which is made if it isn't there.
        settings: settings of the calibration; those in the file have to be the same.
        machine: machine that measures.

    Raises:
        ProfileError: the file is no file of measurements, or has other settings, another processor,
            other cores or other versions of the measured packages.
    """

    def __init__(self, path: Path, settings: dict[str, Any], machine: Machine) -> None:
        self._path = path
        header = {"format": _FORMAT, "version": _VERSION, "settings": settings}
        self.entries: list[dict[str, Any]] = []
        if path.exists():
            head, *self.entries = _read(path)
            there = {**head, **head.get("machine", {})}
            here = {**header, "cpu": machine.cpu, "cores": machine.cores}
            here["versions"] = machine.versions
            other = [
                f"{name} {there.get(name)}, not {value}"
                for name, value in here.items()
                if there.get(name) != value
            ]
            if other:
                raise ProfileError(
                    f"{path} holds other measurements ({'; '.join(other)}): remove it to start anew"
                )
            path.write_text("".join(_line(entry) for entry in [head, *self.entries]))
        else:
            path.write_text(_line({**header, "machine": machine.as_json()}))

    def add(self, kind: str, seconds: float, entry: dict[str, Any]) -> None:
        """Appends one measurement that took `seconds`."""
        entry = {"kind": kind, "seconds": round(seconds, 3), **entry}
        self.entries.append(entry)
        with self._path.open("a") as file:
            file.write(_line(entry))

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The measurements of one kind."""
        return [entry for entry in self.entries if entry["kind"] == kind]

    def seconds(self, kind: str) -> float:
        """Returns the seconds that the measurements of one kind took."""
        return float(sum(entry["seconds"] for entry in self.of(kind)))


def read_records(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Reads a file of measurements and returns its first line, and all others.

    Raises:
        ProfileError: the file is no file of measurements; the text has the line, the place in it
            and the reason.
    """
    head, *entries = _read(path)
    return head, entries


def _read(path: Path) -> Iterator[dict[str, Any]]:
    first, *lines = read_bytes(path, _MOST_BYTES, ProfileError).splitlines(keepends=True) or [b""]
    _HEAD.decode(first, f"{path}, line 1")
    yield decode(first, dict[str, Any], str(path), _CURE, ProfileError)
    entries: list[tuple[str, Any]] = []
    for number, line in enumerate(lines, 2):
        where = f"{path}, line {number}"
        try:
            entries.append((where, decode(line, _ENTRY, where, _CURE, ProfileError)))
        except ProfileError:
            if line.endswith(b"\n"):
                raise
            lines.pop()
    try:
        check_together(entries)
    except ValueError as error:
        raise ProfileError(f"{error}: {_CURE}") from error
    for line in lines:
        yield decode(line, dict[str, Any], str(path), _CURE, ProfileError)


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, separators=(",", ":")) + "\n"

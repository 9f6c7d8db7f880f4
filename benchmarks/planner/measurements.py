"""A calibration's measurements as the benchmarks keep them: by columns, gzipped."""

from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import record

_PATH = record.raw_path(record.RESULTS / "calibration.json")
_REPEATS = ("us", "forward_us", "backward_us")
# Of a repeat; two repeats differ by more than 3 %.
_DIGITS = 3
_PER_MILLE = 1000

Entry = dict[str, Any]


def read(path: Path = _PATH) -> tuple[Entry, list[Entry]]:
    """What the calibration was, and its measurements of each kind in order."""
    packed = record.read_raw(path)
    entries = [
        {"kind": kind, **{n: _unpacked(n, v) for n, v in zip(columns, row, strict=True)}}
        for kind, columns in packed["kinds"].items()
        for row in zip(*columns.values(), strict=True)
    ]
    return packed["head"], entries


def write(path: Path, head: Entry, entries: list[Entry]) -> None:
    """Writes what `read` reads: repeats rounded and in order of size, which no statistic uses."""
    kinds: dict[str, dict[str, list[Any]]] = {}
    for entry in entries:
        columns = kinds.setdefault(entry["kind"], {})
        for name, value in entry.items():
            if name != "kind":
                columns.setdefault(name, []).append(_packed(name, value))
    record.write_raw(path, {"head": head, "kinds": kinds})


def _packed(name: str, value: Any) -> Any:
    """Repeats as the least and the steps from there, shares in per mille."""
    if name in _REPEATS:
        ordered = sorted(float(f"{each:.{_DIGITS}g}") for each in value)
        return [_short(ordered[0]), *(_short(b - a) for a, b in pairwise(ordered))]
    if name == "messages":
        return [{key: _packed(key, each) for key, each in message.items()} for message in value]
    if name == "reuse_factors":
        return [[round(_PER_MILLE * share) for share in of_table] for of_table in value]
    return value


def _unpacked(name: str, value: Any) -> Any:
    if name in _REPEATS:
        return [round(each, 3) for each in accumulate(value)]
    if name == "messages":
        return [{key: _unpacked(key, each) for key, each in message.items()} for message in value]
    if name == "reuse_factors":
        return [[share / _PER_MILLE for share in of_table] for of_table in value]
    return value


def _short(value: float) -> float:
    return int(value) if value == int(value) else round(value, 3)

"""A calibration's measurements as the benchmarks keep them: by columns, gzipped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import record

Entry = dict[str, Any]

_PATH = record.raw_path(record.RESULTS / "calibration.json")
_PER_MILLE = 1000


def read() -> tuple[Entry, list[Entry]]:
    """What the calibration was, and its measurements of each kind in order."""
    packed = record.read_raw(_PATH)
    entries = [
        _changed(
            {"kind": kind, **dict(zip(columns, row, strict=True))},
            repeats=lambda steps: np.cumsum(steps).round(3).tolist(),
            share=lambda per_mille: per_mille / _PER_MILLE,
        )
        for kind, columns in packed["kinds"].items()
        for row in zip(*columns.values(), strict=True)
    ]
    return packed["head"], entries


def write(path: Path, head: Entry, entries: list[Entry]) -> None:
    """Writes what `read` reads: shares in per mille; repeats by size, which no statistic uses."""
    kinds: dict[str, dict[str, list[Any]]] = {}
    for entry in entries:
        packed = _changed(entry, _steps, lambda share: round(_PER_MILLE * share))
        columns = kinds.setdefault(packed.pop("kind"), {})
        for name, value in packed.items():
            columns.setdefault(name, []).append(value)
    record.write_raw(path, {"head": head, "kinds": kinds})


def _changed(entry: Entry, repeats: Callable[..., Any], share: Callable[..., float]) -> Entry:
    """An entry, and the messages in it, with other repeats and shares of reuse factors."""
    changes: dict[str, Any] = dict.fromkeys(("us", "forward_us", "backward_us"), repeats)
    changes["reuse_factors"] = lambda tables: [[share(each) for each in table] for table in tables]
    changes["messages"] = lambda messages: [_changed(each, repeats, share) for each in messages]
    return {n: changes[n](value) if n in changes else value for n, value in entry.items()}


def _steps(repeats: list[float]) -> list[float]:
    """The least one and the steps from there, of three digits: two differ by more than 3 %."""
    ordered = sorted(float(f"{each:.3g}") for each in repeats)
    steps = np.diff(ordered, prepend=0.0).tolist()
    return [int(step) if step == int(step) else round(step, 3) for step in steps]

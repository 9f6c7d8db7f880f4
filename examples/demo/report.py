"""The demo's table, its JSON file and its plot."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from demo.settings import Settings
from demo.summary import Line

WIDTH = 100
PACKAGES = ("torchrec-bls", "torch", "torchrec", "fbgemm-gpu-cpu", "numpy")
COLUMNS = (
    ("", 16),
    ("latency, ms", 15),
    ("batches/s", 10),
    ("waiting", 8),
    ("ideal, ms", 10),
    ("max |diff|", 11),
    ("slots, MiB", 11),
    ("pulled", 7),
)


def format_table(lines: Sequence[Line]) -> str:
    """Formats the table, at most 100 columns wide; a dash stands for what does not apply."""
    rows = [[title for title, _ in COLUMNS], *(_cells(line) for line in lines)]
    text = []
    for row in rows:
        name, *numbers = row
        widths = [width for _, width in COLUMNS]
        text.append(
            name.ljust(widths[0])
            + " "
            + " ".join(n.rjust(w) for n, w in zip(numbers, widths[1:], strict=True))
        )
    text.insert(1, "-" * len(text[0]))
    return "\n".join(text)


def _cells(line: Line) -> list[str]:
    spread = "" if math.isnan(line.latency_ci_ms) else f" ± {line.latency_ci_ms:.2f}"
    bounded = line.bound is not None
    return [
        line.name,
        f"{line.latency_ms:.2f}{spread}",
        f"{line.throughput:.1f}",
        "-" if line.wait_share is None else f"{100 * line.wait_share:.1f} %",
        "-" if line.ideal_ms is None else f"{line.ideal_ms:.2f}",
        f"{line.max_difference:.2g}",
        f"{line.ring_bytes / 2**20:.1f}" if bounded else "-",
        str(line.pulled) if bounded else "-",
    ]


def format_slowest(lines: Sequence[Line]) -> str:
    """Names the slowest rank of each line that knows it; empty if none does."""
    named = [
        f"{line.name}: rank {line.waiting.slowest} ({100 * line.waiting.share:.0f} %)"
        for line in lines
        if line.waiting and line.waiting.slowest is not None
    ]
    if not named:
        return ""
    return "\n".join(
        [
            "slowest rank (waiting that would end if it were as fast as the next):",
            *textwrap.wrap("; ".join(named), WIDTH, initial_indent="  ", subsequent_indent="  "),
        ]
    )


def write_waiting(path: Path, lines: Sequence[Line]) -> None:
    """Writes who waited for whom, and the lag, for each line that knows it."""
    reports = [f"{line.name}\n{line.waiting}\n" for line in lines if line.waiting]
    path.write_text("\n".join(reports))


def write_json(path: Path, lines: Sequence[Line], settings: Settings) -> None:
    """Writes the table with what is needed to repeat it; an unknown number is null."""
    report = {
        "command": " ".join(sys.argv),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": _hardware(),
        "settings": {**asdict(settings), "data": settings.data and str(settings.data)},
        "lines": [
            {
                **{
                    name: None if isinstance(value, float) and math.isnan(value) else value
                    for name, value in asdict(line).items()
                },
                "waiting": line.waiting and line.waiting.to_json(),
            }
            for line in lines
        ],
    }
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _hardware() -> dict[str, Any]:
    cpu_info = Path("/proc/cpuinfo")
    models = (
        [
            line.partition(":")[2].strip()
            for line in cpu_info.read_text().splitlines()
            if line.startswith("model name")
        ]
        if cpu_info.exists()
        else []
    )
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
    }

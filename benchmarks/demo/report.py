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

from benchmarks.demo.settings import Settings
from benchmarks.demo.summary import Line

WIDTH = 100
PACKAGES = ("torchrec-bls", "torch", "torchrec", "fbgemm-gpu-cpu", "numpy")
COLUMNS = (
    ("", 16),
    ("ms per step", 15),
    ("answer, ms", 10),
    ("batches/s", 10),
    ("waiting", 8),
    ("ideal, ms", 9),
    ("max |diff|", 11),
    ("slots, MiB", 10),
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
    spread = "" if math.isnan(line.step_ci_ms) else f" ± {line.step_ci_ms:.2f}"
    return [
        line.name,
        f"{line.step_ms:.2f}{spread}",
        f"{line.answer_ms:.1f}",
        f"{line.throughput:.1f}",
        "-" if line.wait_share is None else f"{100 * line.wait_share:.1f} %",
        "-" if line.ideal_ms is None else f"{line.ideal_ms:.2f}",
        f"{line.max_difference:.2g}",
        "-" if line.bound is None else f"{line.ring_bytes / 2**20:.1f}",
    ]


def format_slowest(lines: Sequence[Line]) -> str:
    """Names the rank that holds the others up, for each line that has one; empty if no line has
    channels."""
    known = [(line.name, line.waiting.waited_least) for line in lines if line.waiting]
    if not known:
        return ""
    named = [
        f"{name}: rank {least.rank} ({least.gain:.0%})"
        for name, least in known
        if least is not None and least.stands_out
    ]
    if not named:
        return "No rank holds the others up at any bound (waiting.txt has who waited)."
    return "\n".join(
        [
            "rank that holds the others up (how much shorter steps would be without its lateness):",
            *textwrap.wrap("; ".join(named), WIDTH, initial_indent="  ", subsequent_indent="  "),
        ]
    )


def write_waiting(path: Path, lines: Sequence[Line], subtitle: str) -> None:
    """Writes who waited for whom, and the lag, for each line that knows it."""
    heading = "\n".join(
        [
            f"Who waited for whom: {subtitle}",
            f"{_now()}, {_command()}",
            "A rank that holds the others up waits least. Ranks get ahead of a peer while it is",
            "late: where all keep pace, most waits are 0 iterations ahead, whatever the bound.",
        ]
    )
    reports = [f"{line.name}\n{line.waiting}\n" for line in lines if line.waiting]
    path.write_text("\n".join([f"{heading}\n", *reports]))


def write_json(path: Path, lines: Sequence[Line], settings: Settings) -> None:
    """Writes the table with what is needed to repeat it; an unknown number is null."""
    report = {
        "command": _command(),
        "date": _now(),
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


def _command() -> str:
    return " ".join(sys.argv)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


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

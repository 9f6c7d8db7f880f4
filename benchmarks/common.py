"""What every benchmark records: the environment, medians with their spread, one JSON file."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Its 97.5 % quantiles for 1, 2, ... degrees of freedom.
_STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "torchrec-bls", "numpy")


def environment() -> dict[str, Any]:
    """Hardware, versions, commit, date and command of this run."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *_relative(sys.argv)]),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median of repeated measurements with their quartiles and extremes, in the samples' unit."""
    if not samples:
        raise ValueError("no samples to summarize")
    ordered = sorted(samples)
    q1, median, q3 = (
        statistics.quantiles(ordered, n=4, method="inclusive")
        if len(ordered) > 1
        else [ordered[0]] * 3
    )
    return {
        "median": median,
        "q1": q1,
        "q3": q3,
        "min": ordered[0],
        "max": ordered[-1],
        "samples": len(ordered),
    }


def mean_interval(samples: Sequence[float]) -> dict[str, float]:
    """Mean of 2 to 10 independent measurements, with the half-width of its 95 % interval."""
    deviation = statistics.stdev(samples) / math.sqrt(len(samples))
    return {
        "mean": statistics.fmean(samples),
        "ci95": _STUDENT_T[len(samples) - 2] * deviation,
        "samples": len(samples),
    }


def write_json(
    path: Path, benchmark: str, started_in: dict[str, Any], settings: dict[str, Any], results: Any
) -> None:
    """Writes one run as `{benchmark, environment, settings, results}`.

    `started_in` is `environment()` from before the run, when its own load did not count yet.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "benchmark": benchmark,
        "environment": started_in,
        "settings": settings,
        "results": results,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")


def pin_to_core(rank: int) -> None:
    """Pins this process round-robin to one of the cores it may use."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _relative(argv: Sequence[str]) -> list[str]:
    script = Path(argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    return [name, *argv[1:]]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head} with local changes" if changed else head


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.lower().startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()

"""What a process holds, and by how much it grew."""

from __future__ import annotations

import gc
from pathlib import Path

Resources = dict[str, int]


def resources() -> Resources:
    """Resident memory in KiB, private and shared, and open descriptors of this process."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "private_kib": int(status["RssAnon"].split()[0]),
        "shared_kib": int(status["RssShmem"].split()[0]),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


def growth(before: Resources, after: Resources) -> Resources:
    """Each figure's difference."""
    return {name: after[name] - before[name] for name in before}


def largest(samples: list[Resources]) -> Resources:
    """Each figure's maximum."""
    return {name: max(sample[name] for sample in samples) for name in samples[0]}

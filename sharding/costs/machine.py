"""Which machine a profile was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "torchrec-bls", "numpy")


@dataclass(frozen=True)
class Machine:
    """The facts of a machine that times depend on.

    Attributes:
        kind: kind of the device that lookups run on; only "cpu" can be calibrated so far.
        cpu: name of the processor.
        cores: cores that the calibration could use.
        memory_bytes: memory of the machine.
        cache_bytes: bytes of one data cache by its level, "L1", "L2", "L3".
        huge_pages: the kernel's setting of transparent huge pages.
        versions: versions of the packages that were measured.
    """

    kind: str
    cpu: str
    cores: int
    memory_bytes: int
    cache_bytes: dict[str, int] = field(default_factory=dict)
    huge_pages: str = "unknown"
    versions: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def this_machine() -> Machine:
    """Looks at the machine that this process runs on."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Machine(
        kind="cpu",
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cache_bytes=_caches(),
        huge_pages=_huge_pages(),
        versions=versions,
    )


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.lower().startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _caches() -> dict[str, int]:
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind = (index / "type").read_text().strip()
            level = (index / "level").read_text().strip()
            size = re.fullmatch(r"(\d+)([KM]?)", (index / "size").read_text().strip())
        except OSError:
            continue
        if kind in ("Data", "Unified") and size:
            unit = {"": 1, "K": 2**10, "M": 2**20}[size[2]]
            caches[f"L{level}"] = int(size[1]) * unit
    return caches


def _huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else "unknown"

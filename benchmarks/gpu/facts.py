"""What a probe ran on: card, driver, link, host, sandbox, and the versions."""

import datetime
import importlib.metadata
import os
import platform
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.gpu import memory
from benchmarks.gpu.runtime import ATTRIBUTES, Runtime

_COPIED = 64 << 20
_ASKED = (
    "driver_version",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "mig.mode.current",
    "compute_mode",
)
_SETTINGS = {
    "huge_pages": "/sys/kernel/mm/transparent_hugepage/enabled",
    "huge_pages_of_files": "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "vendor": "/sys/class/dmi/id/sys_vendor",
    "driver": "/proc/driver/nvidia/version",
}


def environment() -> dict[str, Any]:
    """Host, versions, commit, date and command of this run, as all records have them."""
    host = memory.host_kib()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(host["MemTotal"] / 2**20, 1),
        "memory_left_gib": round(memory.memory_left() / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "sandbox": sandbox(platform.release(), platform.version(), _text(_SETTINGS["vendor"])),
        "python": platform.python_version(),
        "versions": {
            name: _version(name) for name in ("torch", "triton", "numpy", "cuda-bindings")
        },
        "locked_memory_limit": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        **{name: _text(path) for name, path in _SETTINGS.items()},
    }


def sandbox(release: str, version: str, vendor: str | None) -> str:
    """What runs this system, by its kernel: gVisor reports a kernel that never was."""
    if "gvisor" in version.lower() or (
        release.startswith("4.4.0") and "Jan 10 15:06:54" in version
    ):
        return "gVisor"
    if "-fc-" in release or "firecracker" in (vendor or "").lower():
        return "Firecracker"
    return f"unknown ({vendor or 'no vendor'})"


def measure(runtime: Runtime) -> Iterator[dict[str, Any]]:
    """Yields the GPU, its attributes, and its link as it is while a copy has just used it."""
    source = runtime.pinned(_COPIED // 8)
    target = torch.empty_like(source, device=runtime.device)
    times_us = runtime.times_us([lambda: target.copy_(source, non_blocking=True)] * 20)
    found = _output("nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader")
    values = [each.strip() for each in (found or "").split(",")]
    yield {
        **runtime.card(),
        "pinned_copy_gb_per_s": _COPIED / min(times_us) / 1e3,
        "nvidia_smi": dict(zip(_ASKED, values, strict=False)),
        "cuda": torch.version.cuda,
        "attributes": {name: runtime.attribute(name) for name in ATTRIBUTES},
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _text(path: str) -> str | None:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return None


def _version(name: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _output(*command: str) -> str | None:
    """What a program prints, None if there is none or it fails."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()

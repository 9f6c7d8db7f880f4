"""Pages of 2 MiB, which large tables that are read directly ask for."""

import platform
from pathlib import Path

from torchrec_bls.doctor.finding import Finding, Status
from torchrec_bls.doctor.host.sysfs import read

# The first kernel that makes pages of 2 MiB in shared memory on request, whatever shmem_enabled
# says but "deny".
_FIRST_KERNEL = (6, 1)
_CURE_OF_POOL = (
    'huge_pages="hugetlb" takes such pages from a pool: sysctl vm.nr_hugepages=N fills it'
)


def huge_pages_finding(root: Path, kernel: str | None = None) -> Finding:
    """Says whether the host gives pages of 2 MiB to shared memory.

    Args:
        root: root of the file system, for /sys.
        kernel: release of the kernel; None for that of this host.
    """
    kernel = platform.release() if kernel is None else kernel
    chosen = read(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")
    setting = None if chosen is None else chosen.partition("[")[2].partition("]")[0]
    pool = {
        name: _number(root / f"sys/kernel/mm/hugepages/hugepages-2048kB/{name}_hugepages")
        for name in ("nr", "free")
    }
    facts = {
        "kernel": kernel,
        "shmem_enabled": setting,
        "pool_pages": pool["nr"],
        "free_pool_pages": pool["free"],
    }
    in_pool = f"{pool['free']} of {pool['nr']} in the pool (hugetlb) are free"
    if reason := _why_not(kernel, setting):
        return Finding(
            "pages of 2 MiB",
            Status.WARNING,
            f"{reason}; {in_pool}. Large tables that are read directly take small pages: lookups "
            "are slower, a switch to new weights takes longer, and page tables take 2 MiB for "
            "each GiB and process",
            f"Run Linux 6.1 or newer, with 'advise' in "
            f"/sys/kernel/mm/transparent_hugepage/shmem_enabled. {_CURE_OF_POOL}",
            facts,
        )
    text = f"on request (Linux {kernel}, shmem_enabled={setting}); {in_pool}"
    return Finding("pages of 2 MiB", Status.OK, text, facts=facts)


def _why_not(kernel: str, setting: str | None) -> str:
    numbers = [part for part in kernel.replace("-", ".").split(".")[:2] if part.isdecimal()]
    if setting is None:
        return "this kernel has no transparent ones"
    if tuple(map(int, numbers)) < _FIRST_KERNEL:
        return f"Linux {kernel} makes none on request, 6.1 does"
    return "shmem_enabled is 'deny'" if setting == "deny" else ""


def _number(path: Path) -> int:
    text = read(path) or ""
    return int(text) if text.isdecimal() else 0

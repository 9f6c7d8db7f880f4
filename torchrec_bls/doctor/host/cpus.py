"""The CPUs that ranks can run on."""

import os
from collections.abc import Collection
from pathlib import Path

from torchrec_bls.doctor.finding import Finding, Status
from torchrec_bls.doctor.host import cgroup
from torchrec_bls.doctor.host.sysfs import numbered, parse_cpu_list, read


def cpus_finding(root: Path, usable: Collection[int] | None = None) -> Finding:
    """Says how many CPUs, cores and NUMA nodes this process may use.

    Args:
        root: root of the file system, for /sys and /proc.
        usable: numbers of the CPUs; None for those that this process may run on.
    """
    cpus = sorted(os.sched_getaffinity(0) if usable is None else usable)
    cores = {_core(root, cpu) for cpu in cpus}
    nodes = [
        int(folder.name.removeprefix("node"))
        for folder in numbered(root / "sys/devices/system/node", "node")
        if parse_cpu_list(read(folder / "cpulist") or "").intersection(cpus)
    ]
    quota = cgroup.cpu_quota(root)
    facts = {"usable": len(cpus), "cores": len(cores), "numa_nodes": nodes, "quota_cpus": quota}
    text = f"{_count(len(cpus), 'CPU')} usable, {_count(len(cores), 'core')}"
    if nodes:
        text += f", {_count(len(nodes), 'NUMA node')}"
    if quota is not None and quota < len(cpus):
        return Finding(
            "CPUs",
            Status.WARNING,
            f"{text}; the control group allows the time of {quota:g} CPUs",
            "A rank that polls uses the quota up, and then all ranks stand still: give the "
            f"container whole CPUs (docker run --cpuset-cpus) or {len(cpus)} (--cpus)",
            facts,
        )
    if len(cpus) > 1 and len(cores) == 1:
        return Finding(
            "CPUs",
            Status.WARNING,
            f"{text}: the CPUs share it",
            "Two ranks get little more done than one: expect no speed from a second rank here",
            facts,
        )
    if len(cpus) == 1:
        return Finding(
            "CPUs",
            Status.WARNING,
            text,
            "Ranks take turns on it: right, but slow. Give the process one CPU per rank "
            "(taskset, --cpuset-cpus)",
            facts,
        )
    if len(cores) < len(cpus):
        text += f": {len(cpus) - len(cores)} CPUs share a core with another"
    return Finding("CPUs", Status.OK, text, facts=facts)


def _core(root: Path, cpu: int) -> str:
    """Returns the list of the CPUs of a core, which names it."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    siblings = read(topology / "core_cpus_list") or read(topology / "thread_siblings_list")
    return siblings or str(cpu)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"

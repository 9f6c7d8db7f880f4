"""The memory for channels, and how much of it may be locked for an RDMA device."""

import resource
from pathlib import Path

from torchrec_bls.doctor.finding import Finding, Status
from torchrec_bls.doctor.host import cgroup
from torchrec_bls.doctor.host.sysfs import read

# Channels need memory that depends on the model: these are a small and a usual one at the default
# bound, 0. A sharded module has one channel for ids and one for embeddings.
_CHANNELS = 2
_SLOT_BYTES = 1 << 20
_SMALL_RANKS = 2
_USUAL_RANKS = 8

_MEBIBYTE = 1 << 20
_CAP_IPC_LOCK = 14


def ring_bytes(ranks: int) -> int:
    """Returns the bytes of one rank's slots in all channels of a module, bound 0."""
    return _CHANNELS * ranks * 2 * _SLOT_BYTES


def memory_finding(root: Path) -> Finding:
    """Says whether there is enough memory for channels: the host's, or what a control group
    allows."""
    total, left = (_of_meminfo(root, name) for name in ("MemTotal", "MemAvailable"))
    small, usual = (ranks * ring_bytes(ranks) for ranks in (_SMALL_RANKS, _USUAL_RANKS))
    facts: dict[str, int | None] = {"bytes": total, "available_bytes": left}
    facts |= {"limit_bytes": None, "left_bytes": None, "small_bytes": small, "usual_bytes": usual}
    text = f"{_mebibytes(total)}, {_mebibytes(left)} available"
    if (group := cgroup.memory_left(root)) is None:
        text += ", no limit"
    else:
        limit, left_of_group = group
        facts |= {"limit_bytes": limit, "left_bytes": left_of_group}
        text += f"; the control group allows {_mebibytes(limit)}, and has "
        text += f"{_mebibytes(left_of_group)} of it left"
        left = min(left, left_of_group)
    if left >= usual:
        return Finding("memory", Status.OK, text, facts=facts)
    return Finding(
        "memory",
        Status.PROBLEM if left < small else Status.WARNING,
        f"{text}; a sharded module reserves {_mebibytes(small)} with {_SMALL_RANKS} ranks and "
        f"{_mebibytes(usual)} with {_USUAL_RANKS}, at bound 0 and 1 MiB a message",
        "Raise the limit (docker run --memory), or end what else takes memory",
        facts,
    )


def memlock_finding(root: Path, *, device: bool, limit: int | None = None) -> Finding:
    """Says whether this process may lock enough memory for an RDMA device.

    Args:
        root: root of the file system, for /proc.
        device: whether there is an RDMA device, so that the limit matters.
        limit: limit in bytes, `resource.RLIM_INFINITY` for none; None for this process's limit.
    """
    if limit is None:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    # Slots are registered at both ends: those that others write into, and those that a rank writes
    # from.
    small, usual = (2 * ring_bytes(ranks) for ranks in (_SMALL_RANKS, _USUAL_RANKS))
    unlimited = limit == resource.RLIM_INFINITY
    facts = {
        "limit_bytes": None if unlimited else limit,
        "exempt": _may_lock_any(root),
        "small_bytes": small,
        "usual_bytes": usual,
    }
    text = "no limit" if unlimited else f"{limit // 1024} KiB may be locked"
    if facts["exempt"] and not unlimited:
        text += ", but this process is exempt (CAP_IPC_LOCK)"
    if not device:
        return Finding("memlock", Status.OK, f"{text}; not used without a device", facts=facts)
    if unlimited or facts["exempt"] or limit >= usual:
        return Finding("memlock", Status.OK, text, facts=facts)
    return Finding(
        "memlock",
        Status.WARNING,
        f"{text}; between hosts a rank of a sharded module registers {_mebibytes(small)} with "
        f"{_SMALL_RANKS} ranks and {_mebibytes(usual)} with {_USUAL_RANKS}, at bound 0 and 1 MiB a "
        "message",
        "Raise it: ulimit -l unlimited, after a line '* - memlock unlimited' in "
        "/etc/security/limits.conf; LimitMEMLOCK=infinity in a systemd unit; docker run "
        "--ulimit memlock=-1",
        facts,
    )


def _may_lock_any(root: Path) -> bool:
    """Returns whether the limit does not bind this process. The kernel asks for the capability in
    the first user namespace. Containers without root there have it only in their own namespace."""
    status = dict(
        line.split(":", maxsplit=1)
        for line in (read(root / "proc/self/status") or "").splitlines()
        if ":" in line
    )
    capable = int(status.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1
    first_namespace = (read(root / "proc/self/uid_map") or "").split() == ["0", "0", "4294967295"]
    return bool(capable) and first_namespace


def _of_meminfo(root: Path, name: str) -> int:
    for line in (read(root / "proc/meminfo") or "").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _mebibytes(count: int) -> str:
    return f"{count // _MEBIBYTE:,} MiB"

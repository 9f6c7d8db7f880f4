"""The limits that a container or a service manager sets: control groups, version 1 and 2."""

from pathlib import Path

from torchrec_bls.doctor.host.sysfs import read


def cpu_quota(root: Path) -> float | None:
    """Returns how many CPUs' time this process may use, None where there is no limit."""
    quotas = []
    for folder in _folders(root, "cpu"):
        words = (read(folder / "cpu.max") or "").split()
        if not words:
            words = [
                read(folder / "cpu.cfs_quota_us") or "",
                read(folder / "cpu.cfs_period_us") or "",
            ]
        # "max" in version 2, -1 in version 1: no limit.
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal():
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_left(root: Path) -> tuple[int, int] | None:
    """Returns limit and remainder, in bytes, of the group with the least left; None without a
    limit. Shared memory counts."""
    groups = []
    for folder in _folders(root, "memory"):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = read(folder / limit_name), read(folder / usage_name)
            # Version 1 writes the largest number of whole pages if there is no limit.
            if limit and limit.isdecimal() and int(limit) < 1 << 62:
                used = int(usage) if usage and usage.isdecimal() else 0
                used -= _reclaimable(folder)
                groups.append((int(limit), max(0, int(limit) - used)))
    return min(groups, key=lambda group: group[1], default=None)


def _reclaimable(folder: Path) -> int:
    """Returns the bytes of a group that the kernel takes back first: files kept in memory."""
    for line in (read(folder / "memory.stat") or "").splitlines():
        name, _, count = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(count)
    return 0


def _folders(root: Path, controller: str) -> list[Path]:
    """Returns the folders of this process's group and of all groups around it."""
    folders: list[Path] = []
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, group = line.split(":", maxsplit=2)
        if controllers and controller not in controllers.split(","):
            continue
        # In version 2 the line has no controllers. Beside version 1 it is mounted below /unified.
        mounts = [controllers, controller] if controllers else ["", "unified"]
        for mount in mounts:
            top = root / "sys/fs/cgroup" / mount
            # A container may see the host's path, but only its own group, at the top of the mount.
            path = Path(group.strip("/"))
            folders += [top / part for part in (path, *path.parents) if (top / part).is_dir()]
    return folders

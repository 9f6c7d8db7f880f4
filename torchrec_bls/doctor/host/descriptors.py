"""The number of files that a process may have open. Tables that are read directly need some."""

import resource
from pathlib import Path

from torchrec_bls.doctor.finding import Finding, Status

# Direct reads need a number that depends on the model: these are a small and a usual one. A process
# keeps the tables of all ranks open, in two generations while new weights are published.
_GENERATIONS = 2
_SMALL = {"ranks": 2, "modules": 1, "pieces": 4}
_USUAL = {"ranks": 8, "modules": 4, "pieces": 8}


def descriptors_of(ranks: int, modules: int, pieces: int) -> int:
    """Returns how many descriptors a process keeps for modules that read their tables directly.

    Args:
        ranks: number of ranks.
        modules: number of modules.
        pieces: pieces of each rank's tables, about one a table and 66 at most.
    """
    return modules * (ranks * _GENERATIONS * (1 + pieces) + 1)


def descriptors_finding(root: Path, limit: int | None = None) -> Finding:
    """Says whether a process has enough descriptors for the tables of all ranks.

    Args:
        root: root of the file system, for /proc.
        limit: limit of open files, `resource.RLIM_INFINITY` for none; None for this process's
            limit.
    """
    if limit is None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = limit == resource.RLIM_INFINITY
    opened = root / "proc/self/fd"
    in_use = sum(1 for _ in opened.iterdir()) if opened.is_dir() else 0
    small, usual = descriptors_of(**_SMALL), descriptors_of(**_USUAL)
    facts = {
        "limit": None if unlimited else limit,
        "in_use": in_use,
        "small": small,
        "usual": usual,
    }
    text = "no limit" if unlimited else f"{limit:,} may be open, {in_use:,} are"
    if unlimited or limit - in_use >= usual:
        return Finding("descriptors", Status.OK, text, facts=facts)
    return Finding(
        "descriptors",
        Status.PROBLEM if limit - in_use < small else Status.WARNING,
        f"{text}; with direct reads a process keeps {small} for {_SMALL['modules']} module of "
        f"{_SMALL['ranks']} ranks with {_SMALL['pieces']} tables each, and {usual} for "
        f"{_USUAL['modules']} modules of {_USUAL['ranks']} with {_USUAL['pieces']} each",
        "Raise the limit: ulimit -n 65536; LimitNOFILE=65536 in a systemd unit; docker run "
        "--ulimit nofile=65536",
        facts,
    )

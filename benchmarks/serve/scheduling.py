"""What the kernel gives a process: its core, its priority, its CPU time."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def take_core(core: int) -> None:
    """Pins this process to a core, before all others there if that is permitted."""
    os.sched_setaffinity(0, {core})
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    except PermissionError:
        print(
            "SCHED_FIFO is not permitted: others on the core will delay requests (run as root, or "
            "with CAP_SYS_NICE)",
            file=sys.stderr,
        )


def family(root: int) -> list[int]:
    """A process and all that it has started, and these."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        stat = _stat(int(path.name))
        if stat:
            parents[int(path.name)] = int(stat[1])
    found = [root]
    for each in found:
        found += [process for process, parent in parents.items() if parent == each]
    return found


def runs(process: int) -> bool:
    """Whether a process is there, and has neither ended nor been stopped."""
    stat = _stat(process)
    return bool(stat) and stat[0] not in "TtZX"


def stands_still(process: int) -> bool:
    """Whether a process has been stopped, and not ended since."""
    stat = _stat(process)
    return bool(stat) and stat[0] == "T"


def processor_s(processes: Iterable[int]) -> float:
    """CPU seconds that processes have used; of one that has ended, none."""
    stats = filter(None, map(_stat, processes))
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / _TICKS


def _stat(process: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; none if the process has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()

"""The most memory that a process has at once, as another process sees it.

That one is this file as a program, without a package, so that it begins at once.
"""

import contextlib
import ctypes
import mmap
import os
import select
import subprocess
import sys
from pathlib import Path

_PAUSE_S = 0.002


def held_bytes(pid: int | str = "self") -> int:
    """Bytes of a process's anonymous pages and of the memory files that it has open."""
    files = {}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed
            if str(descriptor.readlink()).startswith("/memfd:"):
                found = descriptor.stat()
                files[found.st_ino] = found.st_blocks * 512
    status = Path(f"/proc/{pid}/status").read_text()
    anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return sum(files.values()) + int(anonymous.split()[1]) * 1024


def touch(size: int) -> None:
    """Takes so much memory and gives it back, so that the host of a virtual machine has it at hand.

    Hosts take memory that a machine does not use. Whoever touches it first then waits for the host:
    2.3 s a GiB on one such machine, in place of 0.1 s. The host takes it again within seconds.
    """
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, mmap.PAGESIZE):
            memory[at] = 1


def give_back() -> None:
    """Gives memory that the C library keeps for later back to the system, so that a rise is seen
    that begins with it."""
    ctypes.CDLL(None).malloc_trim(0)


class PeakMemory:
    """Looks at the memory of this process as long as the context lasts.

    Attributes:
        bytes: the most that `held_bytes` has been, once the context has ended.
    """

    bytes = 0

    def __enter__(self) -> "PeakMemory":
        self._process = subprocess.Popen(
            [sys.executable, "-S", __file__, "--look"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        told, _ = self._process.communicate()
        self.bytes = int(told)


def _look_at_parent() -> None:
    """Looks at the parent until it closes the pipe."""
    parent, peak = os.getppid(), 0
    print("begun", flush=True)
    ended = False
    while not ended:
        ended = bool(select.select([sys.stdin], [], [], _PAUSE_S)[0])
        peak = max(peak, held_bytes(parent))
    print(peak)


if __name__ == "__main__" and "--look" in sys.argv:
    _look_at_parent()

"""Identities of processes: this one's, which are alive, and which of them holds a memory file."""

import os
from contextlib import suppress
from pathlib import Path

# Most bits of a process number in Linux.
_PID_BITS = 22
_PID_MASK = (1 << _PID_BITS) - 1
# Fields of /proc/PID/stat after the name of the program.
_STATE, _START = 0, 19


def own_identity() -> int:
    """Returns a number that tells this process from all others since the host was started."""
    identity = identity_of(os.getpid())
    assert identity is not None
    return identity


def identity_of(pid: int) -> int | None:
    """Returns the number that tells a process from all others; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    if fields[_STATE] in "ZXx":
        return None
    return int(fields[_START]) << _PID_BITS | pid


def is_alive(identity: int) -> bool:
    """Returns whether the process of an identity exists. A stopped one does."""
    return identity != 0 and identity_of(identity & _PID_MASK) == identity


def pid_of(identity: int) -> int:
    """Returns the number of the process of an identity."""
    return identity & _PID_MASK


def holder_of(device: int, inode: int) -> tuple[int, int] | None:
    """Returns process and descriptor by which some process of this user holds a file, or None.

    It looks at all descriptors of all processes: for when the process that should hold it is gone.
    """
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with suppress(OSError):  # the process ended, or is another user's
            for descriptor in (process / "fd").iterdir():
                if _is_file(descriptor, device, inode):
                    return int(process.name), int(descriptor.name)
    return None


def _is_file(descriptor: Path, device: int, inode: int) -> bool:
    with suppress(OSError):
        found = descriptor.stat()
        return (found.st_dev, found.st_ino) == (device, inode)
    return False

"""Finds the process that holds a memory file."""

from contextlib import suppress
from pathlib import Path


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

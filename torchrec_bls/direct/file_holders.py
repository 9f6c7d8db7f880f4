"""Finds the process that holds a memory file."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

# This process, or the host, has no more of something: no word about the process that was asked for.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# Times a search in vain that the next one for the same file waits: 0.2 % of a processor.
_REST = 500.0

# When the next search for a file is due that nobody held, in `time.monotonic()`.
_in_vain: dict[tuple[int, int], float] = {}


def is_held(pid: int, descriptor: int, device: int, inode: int) -> bool:
    """Returns whether a process holds a file by a descriptor. Asking takes no descriptor."""
    return _is_file(Path(f"/proc/{pid}/fd/{descriptor}").stat, device, inode)


def holder_of(device: int, inode: int) -> tuple[int, int] | None:
    """Returns process and descriptor by which some process of this user holds a file, or None.

    It looks at all descriptors of all processes: for when the process that should hold it is gone.
    A file that nobody holds does not come back. So after a search in vain the next one for the same
    file comes `_REST` times as long later as the search has taken of the processor, and until then
    the answer is None at once.

    Raises:
        OSError: this process can't look, for want of a descriptor for example.
    """
    now = time.monotonic()
    for file in [file for file, due in list(_in_vain.items()) if due <= now]:
        _in_vain.pop(file, None)
    if (device, inode) in _in_vain:
        return None
    begin = time.thread_time()
    found = _search(device, inode)
    if found is None:
        _in_vain[device, inode] = time.monotonic() + _REST * (time.thread_time() - begin)
    return found


def _search(device: int, inode: int) -> tuple[int, int] | None:
    for process in _own_processes():
        try:
            with os.scandir(f"/proc/{process}/fd") as descriptors:
                for descriptor in descriptors:
                    if _is_file(descriptor.stat, device, inode):
                        return process, int(descriptor.name)
        except OSError as error:
            if error.errno in _EXHAUSTED:
                raise
            # The process has ended.
    return None


def _own_processes() -> Iterator[int]:
    own = os.geteuid()
    for name in os.listdir("/proc"):  # noqa: PTH208
        with suppress(OSError):  # the process has ended
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == own:  # noqa: PTH116
                yield int(name)


def _is_file(look: Callable[[], os.stat_result], device: int, inode: int) -> bool:
    with suppress(OSError):  # it was closed
        found = look()
        return (found.st_dev, found.st_ino) == (device, inode)
    return False

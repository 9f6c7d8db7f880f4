"""Finds the processes that hold memory files."""

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

# This process, or the host, has no more of something: no word about the process that was asked for.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# Times a search in vain that the next one for the same file waits: 0.2 % of a processor.
_REST = 500.0

#: Device and inode of a file.
File = tuple[int, int]

# When the next search for a file is due that nobody held, in `time.monotonic()`.
_in_vain: dict[File, float] = {}


def is_held(pid: int, descriptor: int, device: int, inode: int) -> bool:
    """Returns whether a process holds a file by a descriptor. Asking takes no descriptor."""
    return _file_of(Path(f"/proc/{pid}/fd/{descriptor}").stat) == (device, inode)


def holds_all(pid: int, files: Iterable[File]) -> bool:
    """Returns whether a process holds each of some files. One that can't be asked holds none."""
    missing = set(files)
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as descriptors:
        missing.difference_update(_file_of(each.stat) for each in descriptors)
    return not missing


def holders_of(files: Iterable[File]) -> dict[File, tuple[int, int]]:
    """Returns process and descriptor by which some process of this user holds each of some files.
    Those that nobody holds are left out.

    It looks at all descriptors of all processes: for when the process that should hold them is
    gone. A file that nobody holds does not come back. So after a search in vain the next one for
    the same file comes `_REST` times as long later as the search has taken of the processor, and
    until then it is left out at once.

    Raises:
        OSError: this process can't look, for want of a descriptor for example.
    """
    now = time.monotonic()
    for file in [file for file, due in list(_in_vain.items()) if due <= now]:
        _in_vain.pop(file, None)
    wanted = {file for file in files if file not in _in_vain}
    if not wanted:
        return {}
    begin = time.thread_time()
    found = _search(wanted)
    due = time.monotonic() + _REST * (time.thread_time() - begin)
    _in_vain.update(dict.fromkeys(wanted - found.keys(), due))
    return found


def _search(files: set[File]) -> dict[File, tuple[int, int]]:
    found: dict[File, tuple[int, int]] = {}
    for process in _own_processes():
        try:
            with os.scandir(f"/proc/{process}/fd") as descriptors:
                for descriptor in descriptors:
                    file = _file_of(descriptor.stat)
                    if file in files and file not in found:
                        found[file] = process, int(descriptor.name)
                        if len(found) == len(files):
                            return found
        except OSError as error:
            if error.errno in _EXHAUSTED:
                raise
            # The process has ended.
    return found


def _own_processes() -> Iterator[int]:
    own = os.geteuid()
    for name in os.listdir("/proc"):  # noqa: PTH208
        with suppress(OSError):  # the process has ended
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == own:  # noqa: PTH116
                yield int(name)


def _file_of(look: Callable[[], os.stat_result]) -> File | None:
    with suppress(OSError):  # it was closed
        found = look()
        return found.st_dev, found.st_ino
    return None

"""One keeper for a path: the lock of whoever keeps it."""

import os
import time
from pathlib import Path

from torchrec_bls.direct.offers.file_lock import opened_own, takes_lock
from torchrec_bls.direct.process import identity_of
from torchrec_bls.lifetime import kept_from_children

# States of a stopped process in /proc/PID/stat.
_STOPPED = "Tt"
# Seconds to wait for the end of a process that is dying, and between two looks.
_DEADLINE, _PAUSE = 10.0, 0.005


class PathLock:
    """Keeps other processes from keeping tables at a path, until it is released or the process
    ends, however it does.

    The file stays there, with the number of the process that had the lock last: who removed it
    could not know that nobody waits for it.

    Args:
        path: path of the keeper.

    Raises:
        ValueError: another process has the lock, or the file can't be made.
    """

    def __init__(self, path: str) -> None:
        name = f"{path}.lock"
        end = time.monotonic() + _DEADLINE
        while True:
            try:
                file = kept_from_children(opened_own(name))
            except OSError as error:
                raise ValueError(f"cannot make {name}: {error}") from error
            try:
                while not takes_lock(file.fileno()):
                    # A dead process has the lock until the last of its threads has ended.
                    pid = _pid_in(name)
                    if identity_of(pid) is not None or time.monotonic() >= end:
                        raise ValueError(_why_taken(path, pid))
                    time.sleep(_PAUSE)
                if _is_at(file.fileno(), name):  # nobody has removed it meanwhile
                    break
            except BaseException:
                file.close()
                raise
            file.close()
        self._file = file
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
        file.flush()

    def release(self) -> None:
        """Lets another process keep the path. A forked child has no lock to release."""
        self._file.close()


def _is_at(descriptor: int, name: str) -> bool:
    try:
        found, opened = os.stat(name), os.fstat(descriptor)  # noqa: PTH116
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino)


def _pid_in(name: str) -> int:
    try:
        return int(Path(name).read_text())
    except (OSError, ValueError):  # whoever has the lock has not written it yet
        return 0


def _why_taken(path: str, pid: int) -> str:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return f"another process keeps tables at {path}, and its number is not known"
    stopped = f" and is stopped (kill -CONT {pid}, or -KILL)" if state in _STOPPED else ""
    return f"process {pid} keeps tables at {path}{stopped}: end it before, or use another path"

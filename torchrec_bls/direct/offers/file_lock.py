"""Files of this user alone that processes lock."""

import fcntl
import os
import stat
from typing import BinaryIO


def opened_own(path: str) -> BinaryIO:
    """Opens a file that is made if it is not there, and that no other user can open and so keep
    locked.

    Raises:
        ValueError: it is another user's, open to others, or no file.
        OSError: it can't be made.
    """
    file = open(path, "ab", opener=_open_own)  # noqa: SIM115 (the caller's)
    found = os.fstat(file.fileno())
    is_file, is_shared = stat.S_ISREG(found.st_mode), found.st_mode & 0o077
    if not is_file or is_shared or found.st_uid != os.geteuid():
        file.close()
        raise ValueError(
            f"{path} is another user's, or open to others, who could keep it locked: remove it, or "
            "use a path in another folder"
        )
    return file


def takes_lock(descriptor: int) -> bool:
    """Takes a lock. Returns False if another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_own(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)

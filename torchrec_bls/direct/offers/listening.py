"""A Unix socket at a path where a dead process may have left one."""

import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrec_bls.direct.process import kept_from_children
from torchrec_bls.errors import PeerTimeoutError

_BACKLOG = 64
# Seconds to wait for other processes that listen in the same folder. Each takes only a moment.
_DEADLINE = 10.0
_PAUSE = 0.005
_LONGEST_PATH = 107


def listen(path: str) -> socket.socket:
    """Returns a socket that listens at a path, for processes of this user alone.

    Raises:
        ValueError: a process listens there, the path has something else than a socket or is too
            long, or its folder can't be written to.
        PeerTimeoutError: another process keeps the folder locked.
    """
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ValueError(f"{path} has more than {_LONGEST_PATH} bytes: use a shorter path")
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{folder}, where a socket is to be made, is no folder: make it before")
    with _locked(folder):
        _remove_a_dead_one(path)
        listener = kept_from_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            listener.bind(path)
            Path(path).chmod(0o600)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise ValueError(f"cannot listen at {path}: {error}") from error
        return listener


def _remove_a_dead_one(path: str) -> None:
    try:
        found = Path(path).lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ValueError(f"{path} is there and no socket: give offer() a path of its own")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.setblocking(False)
        try:
            trial.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
        except OSError:
            pass  # the process's queue is full, or it is another user's
    raise ValueError(
        f"a living process offers tables at {path}: give each process a path of its own"
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps two processes from replacing each other's sockets as if the other was dead."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    end = time.monotonic() + _DEADLINE
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise PeerTimeoutError(
                        f"another process has kept {folder} locked for {_DEADLINE} s"
                    ) from None
                time.sleep(_PAUSE)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open, too
        os.close(lock)

"""The files of one checkpoint, read by their bytes. None is ever mapped.

A mapped file that is cut off ends its readers by SIGBUS. `pread` says that there are fewer bytes.
"""

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from torchrec_bls.checkpoints.row_memory import RowMemory
from torchrec_bls.lifetime import new_lock

_T = TypeVar("_T")

# A checkpoint of many ranks has more files than a process may open, often 1024.
_MOST_OPEN = 64


class _State(NamedTuple):
    """What tells that a file is another one now, or has been written to."""

    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> "_State":
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


class _OpenFile:
    """A descriptor that lives as long as the last read of it, in whichever thread that is. One
    that is closed too early can be another file's already."""

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class Files:
    """Files, each as it was when it was added. A file that has changed since is not read any more,
    so that no two checkpoints are ever mixed. Threads may read at the same time.

    Args:
        root: folder of the files.

    Attributes:
        memory: memory for rows of the files.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.memory = RowMemory()
        self._states: dict[Path, _State] = {}
        self._open: dict[Path, _OpenFile] = {}
        self._lock = new_lock()
        self._is_closed = False

    def add(self, path: Path) -> int:
        """Adds a file; symbolic links are followed. Returns its size in bytes.

        Raises:
            ValueError: there is no such file, or it is no regular one.
        """
        found = _called(path, lambda: path.stat())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is no regular file: give the path of a checkpoint")
        return self._states.setdefault(path, _State.of(found)).size

    def read(self, path: Path, at: int, size: int, what: str) -> bytes:
        """Returns `size` bytes of a file from byte `at` on. See `read_into`."""
        data = bytearray(size)
        self.read_into(path, at, memoryview(data), what)
        return bytes(data)

    def read_into(self, path: Path, at: int, memory: memoryview, what: str) -> None:
        """Fills `memory` with the bytes of a file from byte `at` on.

        Args:
            path: a file that was added.
            at: first byte.
            memory: bytes to fill.
            what: what the bytes are, for errors.

        Raises:
            ValueError: the file has fewer bytes, has changed, or can't be read; or the files are
                closed.
        """
        file, done = self._opened(path), 0
        while done < len(memory):
            rest, begin = memory[done:], at + done
            count = _called(path, lambda: os.preadv(file.descriptor, [rest], begin))  # noqa: B023
            if not count:
                size = os.fstat(file.descriptor).st_size
                raise ValueError(
                    f"{path} ends at byte {size}, but {what} at byte {at + len(memory)}: the file "
                    "is cut off; write the checkpoint again"
                )
            done += count
        self._check_unchanged(path, os.fstat(file.descriptor))

    def identity(self) -> str:
        """Returns a digest of names, inodes, sizes and times of all files."""
        known = sorted(
            (os.path.relpath(path, self.root), state) for path, state in self._states.items()
        )
        return hashlib.sha256(repr(known).encode()).hexdigest()

    def written(self) -> float:
        """Returns when the last one was written, in seconds since 1970; 0 without files."""
        return max((state.modified_ns for state in self._states.values()), default=0) / 1e9

    def close(self) -> None:
        """Closes all files, each once the reads of it are done."""
        with self._lock:
            self._is_closed = True
            self._open.clear()

    def _opened(self, path: Path) -> _OpenFile:
        with self._lock:
            if self._is_closed:
                raise ValueError(f"{path} is not read any more: its checkpoint is closed")
            file = self._open.pop(path, None)
            if file is None:
                file = _called(path, lambda: _OpenFile(path))
                self._check_unchanged(path, os.fstat(file.descriptor))
            self._open[path] = file  # the last one again
            if len(self._open) > _MOST_OPEN:
                del self._open[next(iter(self._open))]
        return file

    def _check_unchanged(self, path: Path, found: os.stat_result) -> None:
        if _State.of(found) != self._states[path]:
            raise ValueError(
                f"{path} has changed since the checkpoint was opened: write every checkpoint to a "
                "folder of its own, and leave it as it is while it is read"
            )


def _called(path: Path, call: Callable[[], _T]) -> _T:
    """Returns what the call of the operating system returns, with errors that name the file."""
    try:
        return call()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"{path} can't be read ({reason}): give the path of a complete checkpoint that this "
            "process may read"
        ) from error

"""Host memory as the package shares it: memory files, their seals and mappings, and the pages."""

import ctypes
import errno
import fcntl
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.runtime import words_at

NAME = "torchrec_bls_probe"  # in /proc/PID/maps
HUGE = 2 << 20
READ, WRITE = mmap.PROT_READ, mmap.PROT_WRITE
SHARED, PRIVATE, ANONYMOUS = mmap.MAP_SHARED, mmap.MAP_PRIVATE, mmap.MAP_ANONYMOUS
# Of csrc/host/memory_file.cpp. Python names no seal against later writable mappings.
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
WRITE_SEAL, FUTURE_WRITE_SEAL = fcntl.F_SEAL_WRITE, 0x10

_NO_EXEC = 8  # MFD_NOEXEC_SEAL of Linux 6.3
_NORESERVE, _FIXED = 0x4000, 0x10
_HUGE_PAGE, _NO_HUGE_PAGE, _POPULATE_READ, _COLLAPSE = 14, 15, 22, 25  # madvise
_FILLED_AT_ONCE = 32 << 20  # words

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
for _function in (_libc.munmap, _libc.mprotect, _libc.madvise):
    _function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True)
class Mapping:
    """Mapped memory, whole pages of 2 MiB."""

    address: int
    size: int

    @property
    def words(self) -> torch.Tensor:
        """Its int64 words. The tensor does not keep the mapping."""
        return words_at(self.address, self.size // 8, torch.device("cpu"))

    def protect(self, protection: int) -> str:
        """Changes what this process may do; "" or the error's name."""
        return _error(_libc.mprotect(self.address, self.size, protection))

    def advise_huge(self, huge: bool) -> None:
        """Asks for pages of 2 MiB or against them, before the first touch."""
        _libc.madvise(self.address, self.size, _HUGE_PAGE if huge else _NO_HUGE_PAGE)

    def collapse(self) -> str:
        """Makes pages of 2 MiB of what is there; "" or the error's name."""
        return _error(_libc.madvise(self.address, self.size, _COLLAPSE))

    def populate(self) -> str:
        """Has all pages mapped; "" or the error's name."""
        return _error(_libc.madvise(self.address, self.size, _POPULATE_READ))

    def fill(self) -> None:
        """Writes its own number to each word, by all threads of torch."""
        words = self.words
        for at in range(0, len(words), _FILLED_AT_ONCE):
            part = words[at : at + _FILLED_AT_ONCE]
            torch.arange(at, at + len(part), out=part)

    def pages(self) -> dict[str, int]:
        """Bytes of this process by /proc/self/smaps: in all, its share, and in pages of 2 MiB."""
        found = {"rss": 0, "pss": 0, "anonymous": 0, "huge": 0}
        fields = {
            "Rss": "rss",
            "Pss": "pss",
            "Anonymous": "anonymous",
            "AnonHugePages": "huge",
            "ShmemPmdMapped": "huge",
            "FilePmdMapped": "huge",
        }
        inside, text = False, ""
        with suppress(OSError):  # not every sandbox has it
            text = Path("/proc/self/smaps").read_text()
        for line in text.splitlines():
            if place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                first, last = (int(each, 16) for each in place.groups())
                inside = first < self.address + self.size and self.address < last
            elif inside and (key := fields.get(line.partition(":")[0])):
                found[key] += int(line.split()[1]) << 10
        return found


def whole_pages(size: int) -> int:
    """Bytes as whole pages of 2 MiB."""
    return -(-size // HUGE) * HUGE


@contextmanager
def memory_file(size: int) -> Iterator[int]:
    """The descriptor of a new memory file without pages."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(NAME, flags | _NO_EXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(NAME, flags)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        yield fd
    finally:
        os.close(fd)


def seal(fd: int, seals: int) -> str:
    """Adds seals to a memory file; "" or the error's name."""
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return ""


@contextmanager
def mapped(fd: int, size: int, protection: int, kind: int) -> Iterator[Mapping]:
    """Maps a file, or anonymous memory, where pages of 2 MiB fit. Raises OSError."""
    room = _map(None, size + HUGE, 0, PRIVATE | ANONYMOUS | _NORESERVE, -1)
    try:
        address = whole_pages(room)
        _map(address, size, protection, kind | _FIXED, fd)
        yield Mapping(address, size)
    finally:
        _libc.munmap(room, size + HUGE)


@contextmanager
def filled_file(size: int, huge: bool) -> Iterator[int]:
    """A memory file with the numbers of its words, in pages of 2 MiB or 4 KiB, not mapped."""
    with memory_file(size) as fd:
        with mapped(fd, size, READ | WRITE, SHARED) as mapping:
            write(mapping, huge)
        yield fd


def write(mapping: Mapping, huge: bool) -> None:
    """Fills new memory, with pages of 2 MiB as far as the kernel has any."""
    mapping.advise_huge(huge)
    mapping.fill()
    if huge and mapping.pages()["huge"] < mapping.size:
        mapping.collapse()
        mapping.populate()


def memory_kib(pid: int | str = "self") -> dict[str, int]:
    """KiB of a process's memory: its share of all pages, and those that it has for itself."""
    found: dict[str, int] = {}
    with suppress(OSError):  # gVisor has no such file
        found = _fields(Path(f"/proc/{pid}/smaps_rollup"))
    return {key: found[key] for key in ("Pss", "Anonymous") if key in found}


def host_kib() -> dict[str, int]:
    """KiB of the host: what is left, and shared memory."""
    found = _fields(Path("/proc/meminfo"))
    keys = ("MemTotal", "MemAvailable", "Shmem", "ShmemHugePages", "Mlocked", "Unevictable")
    return {key: found[key] for key in keys if key in found}


def memory_left() -> int:
    """Bytes that this process can still take: of the host, or of its control group."""
    left = host_kib()["MemAvailable"] << 10
    with suppress(OSError, ValueError):
        group = Path("/proc/self/cgroup").read_text().splitlines()[-1].split(":", 2)[2]
        for folder in (Path(f"/sys/fs/cgroup{group}"), Path("/sys/fs/cgroup")):
            with suppress(OSError, ValueError):  # "max" is no limit
                limit = int((folder / "memory.max").read_text())
                left = min(left, limit - int((folder / "memory.current").read_text()))
    with suppress(OSError, ValueError):  # control groups of the first version
        folder = Path("/sys/fs/cgroup/memory")
        limit = int((folder / "memory.limit_in_bytes").read_text())
        left = min(left, limit - int((folder / "memory.usage_in_bytes").read_text()))
    return left


def _fields(path: Path) -> dict[str, int]:
    return {key: int(kib) for key, kib in re.findall(r"(\w+):\s+(\d+) kB", path.read_text())}


def _map(address: int | None, size: int, protection: int, kind: int, fd: int) -> int:
    found = _libc.mmap(address, size, protection, kind, fd, 0)
    if found == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {size >> 20} MiB: {os.strerror(error)}")
    return int(found)


def _error(result: int) -> str:
    if result == 0:
        return ""
    code = ctypes.get_errno()
    return errno.errorcode.get(code, str(code))

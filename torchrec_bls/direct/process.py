"""This process, other processes, and what a forked child has of its parent's.

A fork copies every object, but not what it stands for: the parent publishes, listens and follows,
not the child. So an object with such a part keeps the handle of its process, and asks it at every
use.
"""

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from torch.distributed import distributed_c10d

from torchrec_bls.collective.transport.rendezvous import host_identity
from torchrec_bls.errors import RendezvousError

# Most bits of a process number in Linux.
_PID_BITS = 22
_PID_MASK = (1 << _PID_BITS) - 1
# Fields of /proc/PID/stat after the name of the program.
_STATE, _START = 0, 19
# Seconds that a fork waits for `whole_at_forks`.
_LONGEST_WAIT = 1.0


class Process:
    """A process that `this_process` names. It is made by `this_process` alone.

    Attributes:
        pid: its number, as /proc has it.
        identity: a number that tells it from all others in this PID namespace since the host was
            started, by its start time. Control pages have it.
        host: boot, PID namespace and user namespace, see host_identity.
        is_own: whether this is the process; False in a child that was forked later. It costs no
            more than reading an attribute.
    """

    def __init__(self) -> None:
        try:
            found, self.host = _identity_at("self"), host_identity()
        except OSError as error:
            raise RendezvousError(
                f"cannot look who this process is: {error}. Raise the limit of open files "
                "(ulimit -n)"
            ) from error
        assert found is not None
        self.identity = found
        self.pid = pid_of(found)
        self.is_own = True


def this_process() -> Process:
    """Returns the handle of this process, the same at each call. A forked child has another one.

    Raises:
        RendezvousError: this process has no descriptor left to ask who it is.
    """
    global _own
    with _asking:
        if _own is None:
            _own = Process()
        return _own


def identity_of(pid: int) -> int | None:
    """Returns the number that tells a process from all others; None if it is gone.

    Raises:
        OSError: this process can't look, for want of a descriptor for example.
    """
    return _identity_at(str(pid))


def is_alive(identity: int) -> bool:
    """Returns whether the process of an identity exists. A stopped one does. So does one that this
    process can't look at: a lack of descriptors here is no proof of a death there."""
    if identity == 0:
        return False
    try:
        return identity_of(pid_of(identity)) == identity
    except OSError:
        return _is_in_use(pid_of(identity))


def _is_in_use(pid: int) -> bool:
    """Returns whether a process of this user has a number. It takes no descriptor to ask that."""
    try:
        os.kill(pid, 0)
    except OSError:  # there is none, or another user's
        return False
    return True


def _identity_at(process: str) -> int | None:
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # A process in an inner PID namespace has the number here by which others find it.
    pid = int(text.partition(" ")[0])
    fields = text.rpartition(")")[2].split()
    if fields[_STATE] in "ZXx":
        return None
    return int(fields[_START]) << _PID_BITS | pid


def pid_of(identity: int) -> int:
    """Returns the number of the process of an identity."""
    return identity & _PID_MASK


def new_lock() -> threading.Lock:
    """Returns a lock that is free in a forked child, whichever thread of the parent holds it."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


class _Closable(Protocol):
    def close(self) -> None: ...


_C = TypeVar("_C", bound=_Closable)


def kept_from_children(opened: _C) -> _C:
    """Returns a socket or file of this process. A forked child closes its copy at once, so that the
    other end notices when this process ends."""
    _opened.add(opened)
    return opened


@contextmanager
def whole_at_forks() -> Iterator[None]:
    """Makes a fork of another thread wait for what is done in this context, up to a second: what
    is being mapped belongs to no object yet, so that the child could never unmap it."""
    lock = threading.Lock()
    lock.acquire()
    # Nothing else refers to it: what a signal interrupts before the end is not waited for.
    _running[id(lock)] = weakref.ref(lock)
    try:
        yield
    finally:
        _running.pop(id(lock), None)
        lock.release()


_own: Process | None = None
_asking = threading.Lock()
_locks: "weakref.WeakSet[threading.Lock]" = weakref.WeakSet()
_opened: "weakref.WeakSet[_Closable]" = weakref.WeakSet()
_running: "dict[int, weakref.ref[threading.Lock]]" = {}


def _before_fork() -> None:
    end = time.monotonic() + _LONGEST_WAIT
    for running in list(_running.values()):
        lock = running()
        if lock is not None and lock.acquire(timeout=max(0.0, end - time.monotonic())):
            lock.release()


def _keep_groups() -> None:
    """Keeps process groups of the parent for ever: a child has none of the threads that gloo's
    destructor joins, and would crash at its end."""
    for group in list(distributed_c10d._world.pg_map):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _in_child() -> None:
    global _own, _asking
    if _own is not None:
        _own.is_own = False
    _own, _asking = None, threading.Lock()
    _running.clear()
    with ExitStack() as stack:  # does all, whatever one does
        stack.callback(_keep_groups)
        for lock in list(_locks):
            stack.callback(lock._at_fork_reinit)  # type: ignore[attr-defined]
        for opened in list(_opened):
            stack.callback(opened.close)
        _opened.clear()


os.register_at_fork(before=_before_fork, after_in_child=_in_child)

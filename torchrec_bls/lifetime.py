"""What ends with this process and in which order, and what a forked child renews.

All of the package's ends and renewals are registered here. A fork copies every object, but not what
it stands for: a child has none of its parent's threads, and its channels and tables are the
parent's.
"""

import atexit
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

_T = TypeVar("_T")
_Call = Callable[[], None]

# Seconds that a fork waits for `whole_at_forks`.
_LONGEST_WAIT = 1.0


class When(Enum):
    """The phases of a process's end, in their order. What a phase ends needs the later ones.

    All of it happens before the interpreter's end: a thread that comes back from native code later
    aborts the process.
    """

    #: Nobody gets tables any more. An offer reads tables of a follower, and may be handing over.
    OFFERS = auto()
    #: No more versions of tables are mapped.
    FOLLOWERS = auto()
    #: Peers are told that this rank leaves, and get what they have not read yet.
    CHANNELS = auto()
    #: The threads of torch's gloo groups have nothing to do any more: nobody calls them again.
    GLOO = auto()


def at_exit(when: When) -> Callable[[_Call], _Call]:
    """Returns a decorator: the function is called at the end of the process, in this phase.

    Functions of one phase are called in the order of their registration. They may be called twice,
    and in forked children.
    """

    def register(end: _Call) -> _Call:
        # multiprocessing, which torch imports, waits for child processes at exit. This comes before
        # that, since children may wait for channels of this process.
        if not _ends:
            atexit.register(_end)
        _ends.append((when, end))
        return end

    return register


def end_all() -> None:
    """Ends all that ends with a process, for a process that leaves without `atexit`.

    Raises:
        BaseException: what functions have raised, as `do_all` does.
    """
    do_all(end for phase in When for when, end in list(_ends) if when is phase)


def do_all(calls: Iterable[_Call]) -> None:
    """Makes all calls in their order, even if one raises, or a signal's handler in it. Raises the
    last exception; earlier ones are its context."""
    rest = iter([*calls])
    for call in rest:
        try:
            call()
        except BaseException:
            do_all(rest)
            raise


class Living(Generic[_T]):
    """The objects of one kind that are alive, without keeping them so. Other threads may add some
    while one iterates."""

    def __init__(self) -> None:
        self._references: set[weakref.ref[_T]] = set()

    def add(self, each: _T) -> None:
        """Adds an object."""
        self._references.add(weakref.ref(each, self._references.discard))

    def __iter__(self) -> Iterator[_T]:
        for reference in list(self._references):
            each = reference()
            if each is not None:
                yield each


def in_forked_child(renew: _Call) -> _Call:
    """Has a function called in a forked child, before `fork` returns there. It is a decorator.

    Locks of `new_lock` are free by then. The functions are called in the order of registration, all
    of them.
    """
    _renewals.append(renew)
    return renew


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


_ends: list[tuple[When, _Call]] = []
_renewals: list[_Call] = []
_locks: Living[threading.Lock] = Living()
_opened: Living[_Closable] = Living()
_running: "dict[int, weakref.ref[threading.Lock]]" = {}


def _end() -> None:
    try:
        end_all()
    except BaseException:
        traceback.print_exc()  # Python would show the last one alone


def _before_fork() -> None:
    end = time.monotonic() + _LONGEST_WAIT
    for running in list(_running.values()):
        lock = running()
        if lock is not None and lock.acquire(timeout=max(0.0, end - time.monotonic())):
            lock.release()


def _in_child() -> None:
    _running.clear()
    try:
        do_all(
            [
                *(lock._at_fork_reinit for lock in _locks),  # type: ignore[attr-defined]
                *(opened.close for opened in _opened),
                *_renewals,
            ]
        )
    except BaseException:
        traceback.print_exc()


os.register_at_fork(before=_before_fork, after_in_child=_in_child)

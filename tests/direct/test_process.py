"""Who a process is, and what a forked child has of its parent's."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from tests.direct.test_last_defence import no_descriptors
from torchrec_bls.direct.process import (
    identity_of,
    is_alive,
    kept_from_children,
    new_lock,
    pid_of,
    this_process,
    whole_at_forks,
)

DEADLINE = 30.0


def succeeds_in_child(act: Callable[[], bool]) -> bool:
    """Returns whether `act` returns True in a forked child."""
    child = os.fork()
    if child == 0:
        succeeded = False
        try:
            succeeded = act()
        finally:
            os._exit(0 if succeeded else 1)
    return os.waitpid(child, 0)[1] == 0


def test_a_child_is_another_process() -> None:
    parent = this_process()
    assert this_process() is parent and parent.is_own
    assert (parent.pid, parent.identity) == (os.getpid(), identity_of(os.getpid()))

    def is_another() -> bool:
        child = this_process()
        return (
            child.is_own
            and not parent.is_own
            and (child.pid, child.host) == (os.getpid(), parent.host)
            and child.identity != parent.identity
            and is_alive(parent.identity)
        )

    assert succeeds_in_child(is_another)
    assert parent.is_own


def test_a_lock_of_another_thread_is_free_in_a_child() -> None:
    lock, held, leave = new_lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            leave.wait(DEADLINE)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(DEADLINE)
    assert succeeds_in_child(lambda: lock.acquire(blocking=False))
    assert lock.locked()
    leave.set()
    thread.join()


def test_a_socket_ends_with_its_process() -> None:
    ours, theirs = socket.socketpair()
    kept_from_children(ours)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent is done
        os._exit(0)
    theirs.settimeout(DEADLINE)
    ours.send(b"a")
    assert theirs.recv(1) == b"a"
    ours.close()
    assert theirs.recv(1) == b""
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)
    theirs.close()


def test_a_fork_waits_for_what_another_thread_must_not_leave_unfinished() -> None:
    begun, leave, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        with whole_at_forks():
            begun.set()
            leave.wait(DEADLINE)
            done.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(DEADLINE)
    threading.Timer(0.1, leave.set).start()
    assert succeeds_in_child(done.is_set)
    thread.join()


def test_a_fork_does_not_wait_for_ever() -> None:
    begun, leave = threading.Event(), threading.Event()

    def work() -> None:
        with whole_at_forks():
            begun.set()
            leave.wait(DEADLINE)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(DEADLINE)
    assert succeeds_in_child(lambda: not leave.is_set())
    leave.set()
    thread.join()


def test_nobody_is_gone_for_want_of_descriptors() -> None:
    own = this_process().identity
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with no_descriptors():
        with pytest.raises(OSError, match="Too many open files"):
            identity_of(os.getpid())
        assert is_alive(own)
        assert not is_alive(own - pid_of(own) + child)
        assert not is_alive(0)


_INNER = """
import os
from torchrec_bls.direct.process import is_alive, this_process
own = this_process()
assert os.getpid() == 1 and own.pid != 1 and is_alive(own.identity), own.pid
print(own.host)
"""


def test_a_process_in_an_inner_pid_namespace_is_not_the_first_of_the_outer_one() -> None:
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", _INNER]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() != this_process().host

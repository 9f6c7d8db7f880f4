"""Who a process is."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.direct.test_last_defence import no_descriptors
from torchrec_bls.direct.process import (
    identity_of,
    is_alive,
    pid_of,
    this_process,
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

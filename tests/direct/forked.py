"""Forked children of a test's processes, which are told what to do as the others are."""

import atexit
import os
import signal
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.direct import nodes
from tests.direct.nodes import Node, Nodes, until


def fork(processes: Nodes, parent: object, child: str) -> None:
    """Forks a process, which has all that its parent has."""
    processes.call(parent, _fork, child)
    processes.accept()


def _fork(node: Node, name: str) -> None:
    if os.fork() == 0:
        status = 1
        try:
            nodes.obey(node, name)
            status = 0
        except SystemExit:
            atexit._run_exitfuncs()  # as at the end of a script
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)


def leave(processes: Nodes, child: object) -> None:
    """Has a forked child call sys.exit, and returns when it is gone."""
    pid = processes.call(child, nodes.pid_of)
    processes.begin(child, _exit)
    until(lambda: nodes.state_of(pid) in "ZX")


def _exit(_: Node) -> Any:
    raise SystemExit(0)


def wait_for_child(pid: int, deadline: float) -> int:
    """Returns the exit status of a child of this process.

    Raises:
        TimeoutError: the child has not ended by then, and was killed.
    """
    end = time.monotonic() + deadline
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError(f"child {pid} has not ended after {deadline} s")
        time.sleep(0.002)


def tables_held(_: Node) -> int:
    """Returns how many memory files of this package a process has open."""
    count = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one of this look
            count += "torchrec_bls" in str(each.readlink())
    return count

"""gloo's threads that move the bytes of TCP connections: when they may run."""

import os
from contextlib import suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")
_NAME = "gloo_tcp_loop"  # of such a thread, as gloo sets it


def loop_threads() -> set[int]:
    """Returns the ids of this process's threads that wait for gloo's sockets."""
    return {int(path.name) for path in _THREADS.iterdir() if _name_of(path) == _NAME}


def stop_preempting(threads: set[int]) -> None:
    """Has threads wait for a processor that is free, or for the scheduler's next turn, when they
    wake up.

    gloo's thread otherwise preempts one that is writing to a socket under the connection's lock. It
    tries that lock, fails, and asks for the socket's events again, until its time slice ends. If
    threads outnumber cores, exchanges wait for that much longer than for the network.
    """
    for thread in threads:
        with suppress(OSError):  # it has ended, or a container forbids it
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _name_of(thread: Path) -> str:
    with suppress(OSError):  # ended meanwhile
        return (thread / "comm").read_text().strip()
    return ""

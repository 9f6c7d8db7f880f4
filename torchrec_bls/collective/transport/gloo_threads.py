"""gloo's threads: when those that move bytes may run, and what a process waits for at its end."""

import ctypes
import os
import time
from contextlib import suppress
from pathlib import Path

from torch.distributed import distributed_c10d

from torchrec_bls.lifetime import When, at_exit, in_forked_child

_THREADS = Path("/proc/self/task")
# Of threads, as gloo and torch.distributed set them.
_MOVES_BYTES, _COMPLETES_CALLS = "gloo_tcp_loop", "pt_gloo_runloop"

# Seconds. A thread that waits for Python's lock gets it while this process's main thread pauses.
_PAUSE = 0.01
_LONGEST_WAIT = 5.0


def loop_threads() -> set[int]:
    """Returns the ids of this process's threads that wait for gloo's sockets. None with torch 2.12,
    whose gloo does not name them."""
    return _named(_MOVES_BYTES)


def calling_threads() -> set[int]:
    """Returns the ids of this process's threads that complete calls of gloo's groups."""
    return _named(_COMPLETES_CALLS)


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


@at_exit(When.GLOO)
def _let_calls_end() -> None:
    """Waits until torch's threads that complete gloo's calls have nothing to do.

    Such a thread frees a call's tensors after it has told the caller that the call is complete. It
    needs Python's lock for that, and aborts the process if the interpreter is ending by then
    (https://github.com/pytorch/pytorch/issues/190489). `destroy_process_group` waits for the
    threads only if nobody else holds the group; a sharded model does.
    """
    end = time.monotonic() + _LONGEST_WAIT
    before, now = None, _runs(calling_threads())
    while now and now != before and time.monotonic() < end:
        time.sleep(_PAUSE)
        before, now = now, _runs(calling_threads())


@in_forked_child
def _keep_groups() -> None:
    """Keeps process groups of the parent for ever: a child has none of the threads that gloo's
    destructor joins, and would crash at its end."""
    for group in list(distributed_c10d._world.pg_map):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _runs(threads: set[int]) -> dict[int, tuple[str, ...]]:
    """Returns how often each thread has run. It is another answer each time for one that wants to
    run and has not had its turn yet."""
    found: dict[int, tuple[str, ...]] = {}
    for thread in threads:
        with suppress(OSError):  # ended meanwhile
            status = (_THREADS / str(thread) / "status").read_text().splitlines()
            counts = [line for line in status if "ctxt_switches" in line]
            sleeps = any(line.startswith("State:\tS") for line in status)
            found[thread] = (*counts, "" if sleeps else str(time.monotonic_ns()))
    return found


def _named(name: str) -> set[int]:
    with suppress(OSError):  # no /proc here
        return {int(path.name) for path in _THREADS.iterdir() if _name_of(path) == name}
    return set()


def _name_of(thread: Path) -> str:
    with suppress(OSError):  # ended meanwhile
        return (thread / "comm").read_text().strip()
    return ""

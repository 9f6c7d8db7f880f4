"""torch's gloo groups: at the end of a process, and in forked children."""

import ctypes
import time
from contextlib import suppress
from pathlib import Path

from torch.distributed import distributed_c10d

_THREADS = Path("/proc/self/task")
_COMPLETES_CALLS = "pt_gloo_runloop"  # name of threads, as torch.distributed sets it

# Seconds. A thread that waits for Python's lock gets it while this process's main thread pauses.
_PAUSE = 0.01
_LONGEST_WAIT = 5.0


def calling_threads() -> set[int]:
    """Returns the ids of this process's threads that complete calls of gloo's groups."""
    with suppress(OSError):  # no /proc here
        return {int(path.name) for path in _THREADS.iterdir() if _name_of(path) == _COMPLETES_CALLS}
    return set()


def let_calls_end() -> None:
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


def keep_groups() -> None:
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


def _name_of(thread: Path) -> str:
    with suppress(OSError):  # ended meanwhile
        return (thread / "comm").read_text().strip()
    return ""

"""How the work of a publication leaves cores to lookups, of this process and of others."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# OpenMP's functions as torch has loaded them. A torch without OpenMP has none.
_library = ctypes.CDLL(None)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Has torch use no other thread for operations of this one.

    Steps of a few megabytes gain nothing by threads. OpenMP's threads wait for the next operation
    by spinning, on cores that lookups need. `torch.set_num_threads` would change that for the whole
    process; the number of OpenMP belongs to the calling thread.
    """
    if not hasattr(_library, "omp_set_num_threads"):
        yield
        return
    torch.get_num_threads()  # torch sets a new thread's number at its first use
    threads = _library.omp_get_max_threads()
    try:
        _library.omp_set_num_threads(1)
        yield
    finally:
        _library.omp_set_num_threads(threads)


def leave_core() -> None:
    """Lets a reader that waits for this core have it. The kernel would otherwise let this thread go
    on to the end of its time slice, about as long as ten batches take."""
    os.sched_yield()

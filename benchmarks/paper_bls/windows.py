"""Exchanges with a window over the compared backends: Fig. 7 and Table I of the BLS paper."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from dlrm_plain.exchange import Start, over
from dlrm_plain.run import make_group
from torch import Tensor

from benchmarks.delays.exchanges import (
    Backend,
    Channel,
    Exchange,
    Words,
    common_start,
    measure_windows,
    sleep_until,
)
from benchmarks.harness.launch import gathered
from benchmarks.harness.statistics import taking_turns

#: Of the delays.
SEED = 11
_LIMIT_SECONDS = 120.0
_BYTES = 32 * 1024
_COMPUTE = 0.1
_STOP, _LATE, _CONTINUE = 0.3, 0.4, 0.9


class MpiBackend:
    """MPI restated, since torch's own wheels have no such backend.

    One thread a process runs blocking `MPI_Alltoallv`s in the order of the calls, as
    ProcessGroupMPI does (BLS paper, sec. III-A). Here the thread is one of Python; a call needs the
    interpreter to begin and to end, not in between. mpi4py's command line sets the threads' level.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self._group = MPI.COMM_WORLD.Dup()
        self._progress = ThreadPoolExecutor(1, thread_name_prefix="mpi progress")

    def start(self, received: Tensor, sent: Tensor, receives: list[int], sends: list[int]) -> Any:
        """Queues an all-to-all of flat tensors with splits in elements; returns its handle."""
        memory = [sent.numpy(), sends], [received.numpy(), receives]
        call = self._progress.submit(self._group.Alltoallv, *memory)
        return SimpleNamespace(wait=partial(call.result, _LIMIT_SECONDS))


def starts(bound: int, largest: int, mpi: MpiBackend | None) -> dict[str, Start]:
    """What begins an all-to-all at `bound`, by backend; `largest` has the bytes of a message."""
    groups = {name: over(make_group(name, bound, largest)) for name in ("gloo", "bls")}
    return groups | ({"mpi": mpi.start} if mpi else {})


def measure(stage: str, settings: dict[str, Any], mpi: MpiBackend | None) -> list[dict[str, Any]]:
    """Runs `measure_windows`; one entry for each peer and bound, with the ms per step of the runs.

    "shm" and "tcp" are channels of these transports, read in place; the others are backends.
    """

    def make(words: Words, bound: int) -> dict[str, Exchange]:
        channels = {name: Channel(words, bound, name) for name in ("shm", "tcp")}
        return {**channels, **over_backends(words, bound, mpi)}

    return [
        {
            "peer": name,
            "bound": bound,
            "computed_ideal_ms": ideal,
            "ms_per_step": [elapsed for elapsed, _ in runs],
        }
        for bound, ideal, times in measure_windows(settings, SEED, make, stage)
        for name, runs in times.items()
    ]


def over_backends(words: Words, bound: int, mpi: MpiBackend | None) -> dict[str, Exchange]:
    """Asynchronous all-to-alls of each backend, which copy into the caller's memory.

    "gloo" is bounded lag over any process group: k + 1 calls under way, without a channel, its
    slots and its errors.
    """
    backends = starts(bound, 8 * int(words.max()), mpi)
    return {name: Backend(words, bound, start) for name, start in backends.items()}


def measure_overlaps(
    stage: str, settings: dict[str, Any], mpi: MpiBackend | None
) -> list[dict[str, Any]]:
    """Which stages really overlap, by the clock that the processes of a host share.

    Runs on every rank; one entry for each backend, at bound 0, which the plain DLRM has, and at the
    settings' `bound`, with as many trials as they have `runs`.

    - same_iteration: in how many trials all other ranks completed rank 0's exchange 0 while rank 0
      was in the compute of iteration 0, and called nothing;
    - other_iteration: likewise within its compute of iteration 1, with the other ranks posting
      exchange 0 in that time only, so that it can't have ended before;
    - exchanges: rank 0 posts as many as the bound allows and is then stopped by a signal. The last
      rank posts its own only after that, so that exchange 0 was not complete by then anywhere. How
      many do the ranks between complete nevertheless? So many of rank 0's had been carried out at
      the same time. Median of the trials;
    - one_sided: how many of them does the last rank complete, which asked for nothing before rank
      0 was stopped? So many were carried out by rank 0 alone.
    """
    others = 1 - np.eye(dist.get_world_size(), dtype=np.int64)
    words = np.tile(_BYTES // 8 * others, (settings["bound"] + 2, 1, 1))
    exchanges = {
        (name, bound): exchange
        for bound in (0, settings["bound"])
        for name, exchange in over_backends(words, bound, mpi).items()
    }
    for exchange in exchanges.values():
        exchange.run([0.0], 0.0)  # connects the ranks, for which all have to come
    trials = {case: partial(_trial, exchange) for case, exchange in exchanges.items()}
    entries = []
    for (name, bound), found in sorted(taking_turns(trials, settings["runs"], stage).items()):
        same, other, several, one_sided = zip(*found, strict=True)
        entry = {"backend": name, "bound": bound, "trials": settings["runs"]}
        entry |= {"same_iteration": sum(same), "other_iteration": sum(other)}
        entries.append(entry | {"exchanges": median(several), "one_sided": median(one_sided)})
    return entries


def _trial(exchange: Exchange) -> tuple[bool, bool, int, int]:
    moves = (_moves_during_compute(exchange, iteration) for iteration in (0, 1))
    return (*moves, *_completed_while_stopped(exchange))


def _moves_during_compute(exchange: Exchange, iteration: int) -> bool:
    """Whether the others post and complete exchange 0 within rank 0's compute of `iteration`."""
    begin = common_start()
    if dist.get_rank() == 0:
        computes = []
        for step in range(2 + exchange.bound):
            if step < 2:
                exchange.post(step)
                computes.append((time.monotonic(), _compute()))
            if step >= exchange.bound:
                exchange.complete(step - exchange.bound)
        span = computes[iteration]
    else:
        sleep_until(begin + (iteration + 0.5) * _COMPUTE)
        posted = time.monotonic()
        exchange.post(0)
        exchange.complete(0)
        span = posted, time.monotonic()
        exchange.post(1)
        exchange.complete(1)
    (begin, end), *others = gathered(span)
    return all(begin < posted and completed < end for posted, completed in others)


def _completed_while_stopped(exchange: Exchange) -> tuple[int, int]:
    """Returns the number for the ranks between the first and the last, and that for the last."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pids = gathered(os.getpid())
    begin = common_start()
    if rank == 1:
        for at, number in ((_STOP, signal.SIGSTOP), (_CONTINUE, signal.SIGCONT)):
            delay = begin + at - time.monotonic()
            threading.Timer(delay, os.kill, (pids[0], number)).start()
    if rank == ranks - 1:
        sleep_until(begin + _LATE)
    for step in range(exchange.bound + 1):
        exchange.post(step)
    if rank == 0:
        sleep_until(begin + _CONTINUE)
    completed = 0
    for step in range(exchange.bound + 1):
        exchange.complete(step)
        completed += time.monotonic() < begin + _CONTINUE
    counts = gathered(completed)
    return min(counts[1:-1]), counts[-1]


def _compute() -> float:
    """Computes for a while without the interpreter's lock; returns the time at its end."""
    matrix = torch.rand(256, 256)
    end = time.monotonic() + _COMPUTE
    while (now := time.monotonic()) < end:
        torch.mm(matrix, matrix)
    return now

"""Table I of the BLS paper, measured: which stages really overlap.

All times are of the clock that the processes of a host share.
"""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from dlrm_plain.exchange import Start, over
from dlrm_plain.run import make_group
from tqdm import tqdm

from benchmarks.harness.launch import gathered
from benchmarks.paper_bls.mpi import MpiBackend

_BYTES = 32 * 1024
_COMPUTE = 0.1
# Others are late by half of rank 0's compute, or by half of its second one.
_WITHIN_FIRST, _WITHIN_SECOND = 0.5 * _COMPUTE, 1.5 * _COMPUTE
_STOP, _LATE, _CONTINUE = 0.3, 0.4, 0.9


def measure(stage: str, settings: dict[str, Any], mpi: MpiBackend | None) -> list[dict[str, Any]]:
    """Runs on every rank; one entry for each backend, at bound 0, which the plain DLRM has, and at
    the settings' `bound`, with as many trials as they have `runs`.

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
    backends = ["gloo", "bls", *(["mpi"] if mpi else [])]
    cases = [(backend, bound) for backend in backends for bound in (0, settings["bound"])]
    entries = []
    with tqdm(
        total=len(cases) * settings["runs"], disable=dist.get_rank() != 0, desc=stage, unit="trial"
    ) as bar:
        for backend, bound in cases:
            start = (
                mpi.start if backend == "mpi" and mpi else over(make_group(backend, bound, _BYTES))
            )
            _poster(start)().wait()  # connects the ranks, for which all have to come
            trials = []
            for _ in range(settings["runs"]):
                same = _moves_during_compute(start, bound, _WITHIN_FIRST, iteration=0)
                other = _moves_during_compute(start, bound, _WITHIN_SECOND, iteration=1)
                trials.append((same, other, *_completed_while_stopped(start, bound)))
                bar.update()
            names = ("same_iteration", "other_iteration", "exchanges", "one_sided")
            combined = zip(
                names, (sum, sum, median, median), zip(*trials, strict=True), strict=True
            )
            found = {name: combine(of_trials) for name, combine, of_trials in combined}
            case = {"backend": backend, "bound": bound, "trials": settings["runs"]}
            entries.append(case | found)
    return entries


def _moves_during_compute(start: Start, bound: int, late: float, iteration: int) -> bool:
    post = _poster(start)
    begin = _common_start()
    computes, posted, completed = [], 0.0, 0.0
    if dist.get_rank() == 0:
        under_way: deque[Any] = deque()
        for _ in range(2):
            under_way.append(post())
            computes.append((time.monotonic(), _compute()))
            if len(under_way) > bound:
                under_way.popleft().wait()
        for work in under_way:
            work.wait()
    else:
        _sleep_until(begin + late)
        posted = time.monotonic()
        post().wait()
        completed = time.monotonic()
        post().wait()
    everyone = gathered((computes, posted, completed))
    compute_begin, compute_end = everyone[0][0][iteration]
    return all(
        compute_begin < posted and completed < compute_end for _, posted, completed in everyone[1:]
    )


def _completed_while_stopped(start: Start, bound: int) -> tuple[int, int]:
    """Returns the number for the ranks between the first and the last, and that for the last."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pids = gathered(os.getpid())
    post = _poster(start)
    begin = _common_start()
    if rank == 1:
        for at, number in ((_STOP, signal.SIGSTOP), (_CONTINUE, signal.SIGCONT)):
            delay = begin + at - time.monotonic()
            threading.Timer(delay, os.kill, (pids[0], number)).start()
    if rank == ranks - 1:
        _sleep_until(begin + _LATE)
    under_way = [post() for _ in range(bound + 1)]
    if rank == 0:
        _sleep_until(begin + _CONTINUE)
    completed = 0
    for work in under_way:
        work.wait()
        completed += time.monotonic() < begin + _CONTINUE
    counts = gathered(completed)
    return min(counts[1:-1]), counts[-1]


def _poster(start: Start) -> Callable[[], Any]:
    """Returns what posts an exchange of `_BYTES` a pair."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    splits = [0 if other == rank else _BYTES for other in range(ranks)]
    memory = []

    def post() -> Any:
        # Each has its own memory, which is kept to the end of the trial.
        memory.append([torch.zeros(sum(splits), dtype=torch.uint8) for _ in range(2)])
        return start(*memory[-1], splits, splits)

    return post


def _compute() -> float:
    """Computes for a while without the interpreter's lock; returns the time at its end."""
    matrix = torch.rand(256, 256)
    end = time.monotonic() + _COMPUTE
    while (now := time.monotonic()) < end:
        torch.mm(matrix, matrix)
    return now


def _common_start() -> float:
    start = torch.tensor(time.monotonic() + 0.05, dtype=torch.float64)
    dist.broadcast(start, 0)
    _sleep_until(start.item())
    return float(start.item())


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))

"""Started by mpirun: prints the µs of a step and of all processors in it, for each cell in turn.

A step posts an MPI_Ialltoall, computes, and waits for the one posted `bound` steps before. Without
this package, whose imports take longer than what is measured. Arguments: seconds of a cell, then
bytes for a peer, ms of computing and bound of each.
"""

import json
import sys
import time
from collections import deque
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI


def main() -> None:
    world = MPI.COMM_WORLD
    seconds, given, found = float(sys.argv[1]), list(map(int, sys.argv[2:])), []
    for size, compute_ms, bound in zip(given[::3], given[1::3], given[2::3], strict=True):
        sent = np.zeros(size * world.size, np.uint8)
        received = deque(np.zeros_like(sent) for _ in range(bound + 1))
        measure = partial(_steps, world, sent, received, bound, compute_ms / 1e3)
        measure(1)
        once = measure(2)[0] / 1e6 + compute_ms / 1e3
        found.append(measure(max(4, min(200, round(seconds / once)))))
    if world.rank == 0:
        print(json.dumps(found))


def _steps(
    world: Any,
    sent: np.ndarray,
    received: deque[np.ndarray],
    bound: int,
    compute_s: float,
    count: int,
) -> tuple[float, float]:
    """µs a step of the slowest rank, less those of computing, and of all ranks' processors."""
    requests: deque[Any] = deque()
    world.Barrier()
    cpu, start = time.process_time(), time.perf_counter()
    for _ in range(count):
        requests.append(world.Ialltoall(sent, received[0]))
        received.rotate(-1)
        end = time.thread_time() + compute_s  # see over_tcp
        while time.thread_time() < end:
            pass
        if len(requests) > bound:
            requests.popleft().Wait()
    while requests:
        requests.popleft().Wait()
    took = (time.perf_counter() - start) / count - compute_s
    cpu = (time.process_time() - cpu) / count
    return 1e6 * world.allreduce(took, MPI.MAX), 1e6 * world.allreduce(cpu, MPI.SUM)


if __name__ == "__main__":
    main()

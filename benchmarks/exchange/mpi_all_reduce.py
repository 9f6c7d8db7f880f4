"""Started by mpirun: prints the µs a call of MPI_Allreduce, of the slowest rank, by size.

Without this package, whose imports take longer than what is measured. Arguments: bytes and calls of
each size in turn.
"""

import json
import os
import sys
import time

import numpy as np
from mpi4py import MPI


def main() -> None:
    world = MPI.COMM_WORLD
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    given, found = list(map(int, sys.argv[1:])), []
    for size, calls in zip(given[::2], given[1::2], strict=True):
        numbers = np.zeros(size // 4, np.float32)
        world.Allreduce(MPI.IN_PLACE, numbers)
        world.Barrier()
        start = time.perf_counter()
        for _ in range(calls):
            world.Allreduce(MPI.IN_PLACE, numbers)
        found.append(1e6 * world.allreduce((time.perf_counter() - start) / calls, MPI.MAX))
    if world.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Work on several ranks, each a process with one thread in a gloo group."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from torchrec_bls.processes import run

_DEADLINE_S = 4 * 3600.0
#: What ranks need, for the server that they are forked from.
IMPORTED_ONCE = ("torchrec_bls.distributed.sharded_ec", "torchrec_bls.distributed.sharded_ebc")


def on_ranks(ranks: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `work(rank, *arguments)` on every rank and returns what rank 0 returns, see `run`."""
    how = {"deadline_s": _DEADLINE_S, "backend": "gloo", "preload": IMPORTED_ONCE}
    return run(ranks, work, *arguments, **how)[0]


def slowest_ms(call: Callable[[], object], repetitions: int = 1) -> float:
    """Milliseconds of a call on the slowest rank, of some back to back that begin together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repetitions):
        call()
    return max(gathered((time.perf_counter() - start) / repetitions * 1e3))


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def pin_to_core(rank: int) -> None:
    """Pins this process round-robin to one of the cores it may use."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})

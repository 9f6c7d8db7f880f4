"""Times collectives between processes of this machine."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchrec_bls.collective.backend.options import BLSOptions
from torchrec_bls.processes import stream

from .messages import WORD_BYTES, Message

#: One sample is the mean of calls back to back that take about this long.
SAMPLE_SECONDS = 0.004
MOST_CALLS = 20
LEAST_ROUNDS = 5
_START_SECONDS = 120.0
_HEADER_BYTES = 256  # more than a message's header takes


@dataclass(frozen=True)
class CollectiveTask:
    """The messages of one backend among the first `world_size` ranks.

    Attributes:
        backend: "gloo", "bls", or "tcp" for channels of bls over TCP.
        world_size: ranks.
        messages: messages for that many ranks.
        seconds: time after which rounds over all messages end; at least `LEAST_ROUNDS` are made.
    """

    backend: str
    world_size: int
    messages: tuple[Message, ...]
    seconds: float


def measure_collectives(tasks: Sequence[CollectiveTask]) -> Iterator[list[dict[str, Any]]]:
    """Times messages between new processes.

    Args:
        tasks: tasks to measure one after the other, in the same processes.

    Yields:
        For each task its messages' fields, each with `backend` and `world_size`. `us` has one
        sample a round, the microseconds of the slowest rank. `cpu_us` is the time of a rank's
        threads on cores, the mean of all ranks.

    Raises:
        RanksFailedError: a rank failed.
    """
    deadline = _START_SECONDS + sum(20 * task.seconds + len(task.messages) for task in tasks)
    with tempfile.TemporaryDirectory() as folder:
        world_size = max(task.world_size for task in tasks)
        yield from stream(
            world_size,
            _rank,
            world_size,
            (Path(folder) / "store").as_uri(),
            tuple(tasks),
            deadline,
            deadline_s=deadline,
            preload=("torchrec_bls.distributed.sharded_ebc",),
        )


def _rank(
    rank: int, world_size: int, store: str, tasks: tuple[CollectiveTask, ...], deadline: float
) -> Iterator[list[dict[str, Any]]]:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=deadline)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world_size, timeout=timeout
    )
    for task in tasks:
        members = list(range(task.world_size))
        with _core_of(rank, task):
            group = _group(task, members, timeout)
            if rank in members:
                assert group is not None
                yield _measure(task, rank, group)
        # The others sleep here meanwhile.
        dist.barrier()
    dist.destroy_process_group()


@contextmanager
def _core_of(rank: int, task: CollectiveTask) -> Iterator[None]:
    """Gives channels over TCP a core for each rank and its threads, as ranks have in measured
    steps, where there are as many."""
    cores = os.sched_getaffinity(0)
    if task.backend == "tcp" and rank < task.world_size <= len(cores):
        _run_on({sorted(cores)[rank]})
    try:
        yield
    finally:
        _run_on(cores)


def _run_on(cores: set[int]) -> None:
    """Puts all threads on these cores: the one of channels over TCP outlives the task."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)


def _group(
    task: CollectiveTask, members: list[int], timeout: timedelta
) -> dist.ProcessGroup | None:
    backend, options = task.backend, None
    if backend == "tcp":
        backend = "bls"
        largest = max(max(map(max, message.bytes)) for message in task.messages)
        options = BLSOptions(
            transport="tcp", slot_bytes=largest + _HEADER_BYTES, deadline=timeout.total_seconds()
        )
    group: dist.ProcessGroup | None = dist.new_group(
        members, backend=backend, timeout=timeout, pg_options=options
    )
    return group


def _measure(task: CollectiveTask, rank: int, group: dist.ProcessGroup) -> list[dict[str, Any]]:
    works = _prepare(task, rank, group)
    calls = [_calls(work, group) for work in works]
    samples: list[list[tuple[float, float]]] = [[] for _ in works]
    end = time.monotonic() + task.seconds
    rounds = 0
    while rounds < LEAST_ROUNDS or _everybody_has_time(end, group):
        # The same order for all ranks, another one each round.
        for i in np.random.default_rng(rounds).permutation(len(works)):
            wall, cpu = _wall_and_cpu_us(works[i], calls[i], group)
            samples[i].append((round(wall, 2), round(cpu, 2)))
        rounds += 1
    return [
        {
            **message.as_json(),
            "backend": task.backend,
            "world_size": task.world_size,
            "us": [wall for wall, _ in each],
            "cpu_us": [cpu for _, cpu in each],
        }
        for message, each in zip(task.messages, samples, strict=True)
    ]


def _prepare(
    task: CollectiveTask, rank: int, group: dist.ProcessGroup
) -> list[Callable[[], object]]:
    """One function for each message; all of them use the same two buffers."""
    words = max(message.largest_rank_bytes() for message in task.messages) // WORD_BYTES
    source, target = torch.zeros(words), torch.ones(words)
    works: list[Callable[[], object]] = []
    for message in task.messages:
        if message.operation == "all_reduce":
            part = source[: message.bytes[0][0] // WORD_BYTES]
            works.append(partial(dist.all_reduce, part, group=group))
        else:
            sent = [size // WORD_BYTES for size in message.bytes[rank]]
            received = [row[rank] // WORD_BYTES for row in message.bytes]
            to, what = target[: sum(received)], source[: sum(sent)]
            works.append(partial(dist.all_to_all_single, to, what, received, sent, group=group))
    return works


def _calls(work: Callable[[], object], group: dist.ProcessGroup) -> int:
    """How many calls make a sample; the slowest rank decides."""
    work()
    microseconds = slowest_us(work, 1, group)
    return max(1, min(MOST_CALLS, int(SAMPLE_SECONDS * 1e6 / microseconds)))


def slowest_us(work: Callable[[], object], calls: int, group: dist.ProcessGroup | None) -> float:
    """Returns the microseconds of a call on the slowest rank. The mean of `calls` calls back to
    back, which all ranks begin together. None is the default group."""
    return _wall_and_cpu_us(work, calls, group)[0]


def _wall_and_cpu_us(
    work: Callable[[], object], calls: int, group: dist.ProcessGroup | None
) -> tuple[float, float]:
    """Returns the same, and the microseconds of a process's threads on cores, the mean rank's."""
    dist.barrier(group)
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(calls):
        work()
    seconds = time.perf_counter() - start, time.process_time() - cpu_start
    wall, cpu = (torch.tensor(each / calls * 1e6, dtype=torch.float64) for each in seconds)
    dist.all_reduce(wall, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(cpu, group=group)
    return wall.item(), cpu.item() / dist.get_world_size(group)


def _everybody_has_time(end: float, group: dist.ProcessGroup) -> bool:
    late = torch.tensor(float(time.monotonic() >= end))
    dist.all_reduce(late, dist.ReduceOp.MAX, group=group)
    return not late.item()

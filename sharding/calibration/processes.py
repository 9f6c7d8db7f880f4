"""One process for each rank, and the first failure of any of them."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any


class RankError(RuntimeError):
    """A rank failed; the message has its traceback."""


def run_ranks(
    work: Callable[..., Iterator[Any]], world_size: int, *arguments: Any, deadline_seconds: float
) -> Iterator[Any]:
    """Runs `work(rank, world_size, *arguments)` in fresh processes.

    Args:
        work: importable generator function.
        world_size: number of processes.
        *arguments: picklable.
        deadline_seconds: for all of it.

    Yields:
        What rank 0 yields, as soon as it does.

    Raises:
        RankError: a rank raised, died or took too long.
    """
    # Forked from a process that has done the imports once, and nothing else.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torchrec_bls.distributed.sharded_ebc"])
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        context.Process(
            target=_guard, args=(pipes[rank][1], work, rank, world_size, arguments), daemon=True
        )
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + deadline_seconds
    try:
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()  # so that the death of the process ends the pipe
        waiting: dict[Connection, int] = {reader: r for r, (reader, _) in enumerate(pipes)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankError(
                    f"ranks {sorted(waiting.values())} did not end in {deadline_seconds:.0f} s"
                )
            for reader in ready:
                assert isinstance(reader, Connection)
                rank = waiting[reader]
                ended, result = _receive(reader, rank)
                if ended:
                    del waiting[reader]
                elif rank == 0:
                    yield result
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
                process.close()
        for reader, _ in pipes:
            reader.close()


def _receive(reader: Connection, rank: int) -> tuple[bool, Any]:
    try:
        what, result = reader.recv()
    except EOFError:
        raise RankError(f"rank {rank} died") from None
    if what == "failure":
        raise RankError(f"rank {rank} failed:\n{result}")
    return what == "end", result


def _guard(
    sender: Connection,
    work: Callable[..., Iterator[Any]],
    rank: int,
    world_size: int,
    arguments: tuple[Any, ...],
) -> None:
    try:
        for result in work(rank, world_size, *arguments):
            sender.send(("result", result))
        sender.send(("end", None))
    except BaseException:
        sender.send(("failure", traceback.format_exc()))

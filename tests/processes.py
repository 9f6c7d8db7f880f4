"""Runs a function on several ranks, each a process of its own with a fresh process group.

The ranks are forked from a server that has done the imports once, so that a rank costs
milliseconds. Every rank is new: no test sees what another one left behind, and a rank may crash.
"""

import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import connection, get_context
from typing import Any

import torch
import torch.distributed as dist

from torchrec_bls.collective import channel

DEFAULT_DEADLINE = 60.0

# "fork" where imports take minutes: this process has done them.
# Called by every rank before its function. A fixture may set it.
preparation: Callable[[], None] | None = None

_context = get_context(os.environ.get("TORCHREC_BLS_TEST_START_METHOD", "forkserver"))
_context.set_forkserver_preload(
    [
        "torch",
        "torchrec_bls.distributed.sharded_ec",
        "torchrec_bls.distributed.sharded_ebc",
        "torchrec_bls.pipeline",
        "pytest",
        "hypothesis",
    ]
)


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        rank: of the process group.
        value: what the function returned.
        error: name of the type of the exception it raised, "ProcessDied" when its process went
            away, "DeadlinePassed" when it was killed at the deadline, None when it returned.
        message: text of the exception.
        traceback: of the exception, as text.
        exit_code: of the process; minus the number of the signal that ended it. None if it had to
            be killed.
    """

    rank: int
    value: Any = None
    error: str | None = None
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None

    def __str__(self) -> str:
        if self.error is None:
            return f"rank {self.rank} returned {self.value!r}"
        return f"rank {self.rank} raised {self.error}: {self.message}\n{self.traceback}"


class RanksFailedError(AssertionError):
    """Ranks raised, died or did not return; the text has every one's traceback."""

    def __init__(self, failed: Sequence[Outcome]) -> None:
        super().__init__("\n".join(str(outcome) for outcome in failed))
        self.failed = failed


def run(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    deadline: float = DEFAULT_DEADLINE,
    backend: str = "gloo",
) -> list[Any]:
    """Calls `function(rank, *args)` on every rank and returns the results by rank.

    Args:
        world_size: number of ranks. The default process group is set up in each.
        function: defined at the top of a module; it, `args` and the results are pickled.
        deadline: seconds until the ranks that have not returned are killed.
        backend: of the default process group.

    Raises:
        RanksFailedError: a rank did not return.
    """
    outcomes = run_outcomes(world_size, function, *args, deadline=deadline, backend=backend)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        raise RanksFailedError(failed)
    return [outcome.value for outcome in outcomes]


def run_outcomes(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    deadline: float = DEFAULT_DEADLINE,
    fresh_interpreters: bool = False,
    backend: str = "gloo",
) -> list[Outcome]:
    """Like `run`, for ranks that are expected to fail: returns by rank how each one ended.

    A rank that returns closes its channels, as the end of a script does, so that what its peers
    have not read yet is kept for them. Then ranks leave by os._exit unless they are
    `fresh_interpreters`, which cost the time of the imports and end as a script does.
    """
    context = get_context("spawn") if fresh_interpreters else _context
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    task = pickle.dumps((preparation, function, args, backend))
    end = time.monotonic() + deadline
    pipes, processes = [], []
    for rank in range(world_size):
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main, args=(rank, world_size, store.port, task, sending, deadline)
        )
        process.start()
        sending.close()
        pipes.append(receiving)
        processes.append(process)
    try:
        _wait_for_answers(pipes, end)
        return [
            _outcome(rank, pipe, process, end)
            for rank, pipe, process in zip(range(world_size), pipes, processes, strict=True)
        ]
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _wait_for_answers(pipes: Sequence[connection.Connection], end: float) -> None:
    """Returns when every rank has answered or died, or at `end`."""
    waiting = list(pipes)
    while waiting and (remaining := end - time.monotonic()) > 0:
        # A pipe of a dead rank is readable too: it is at its end.
        for ready in connection.wait(waiting, remaining):
            waiting.remove(ready)  # type: ignore[arg-type]


def _outcome(rank: int, pipe: connection.Connection, process: Any, end: float) -> Outcome:
    if not pipe.poll():
        # It writes its stacks to stderr, which pytest shows for the test.
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.2)
        return Outcome(rank, error="DeadlinePassed", message="killed, its stacks are on stderr")
    try:
        outcome = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join()
        outcome = Outcome(rank, error="ProcessDied", message=f"exit code {process.exitcode}")
    process.join(max(0.0, end - time.monotonic()))
    return replace(outcome, exit_code=process.exitcode)


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    task: bytes,
    answer: connection.Connection,
    deadline: float,
) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    signal.alarm(int(deadline) + 10)  # the end of this process even if the tests are killed
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        prepare, function, args, backend = pickle.loads(task)
        if prepare is not None:
            prepare()
        dist.init_process_group(
            backend,
            store=dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=deadline)),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=deadline),
        )
        outcome = pickle.dumps(Outcome(rank, function(rank, *args)))
        exit_code = 0
    except BaseException as error:
        outcome = pickle.dumps(
            Outcome(
                rank,
                error=type(error).__name__,
                message=str(error),
                traceback=traceback.format_exc(),
            )
        )
        exit_code = 1
    answer.send_bytes(outcome)
    answer.close()
    if exit_code == 0:
        channel._close_all()
    sys.exit(exit_code)

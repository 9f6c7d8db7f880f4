"""Runs a function on several ranks, which are processes of this host, up to a deadline.

`run` returns the results of all ranks. `outcomes` returns how each of them ended. `stream` yields
what rank 0 yields. None of them leaves a process behind. Ranks that have not ended when they return
or raise are killed. Ranks whose caller is killed end by themselves.
"""

from __future__ import annotations

import faulthandler
import fcntl
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from torchrec_bls.errors import PeerClosedError, PeerDiedError, PoisonedError
from torchrec_bls.lifetime import end_all

#: What ranks may take to end after the first one has failed.
GRACE_S = 2.0

_ENDING_SIGNALS = {signal.SIGINT, signal.SIGTERM}

# Seconds for a rank that is about to be killed to write its stacks, even on a busy machine.
_STACKS_S = 1.0


@dataclass(frozen=True)
class Outcome:
    """The end of one rank.

    Attributes:
        rank: number of the process, from 0 on.
        value: result of the function.
        error: name of the exception's type. "ProcessDied": the rank's process went away.
            "DeadlinePassed": it was killed at the deadline. "Stopped": it was killed because
            another rank had failed. None: the function returned.
        message: text of the exception.
        traceback: traceback of the exception, as text.
        exit_code: exit code of the process; minus the number of the signal that ended it. None if
            it had to be killed.
        consequence: whether the exception says that another rank has failed.
        ended_at: `time.monotonic()` when the function raised; 0 if it did not.
    """

    rank: int
    value: Any = None
    error: str | None = None
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None
    consequence: bool = False
    ended_at: float = 0.0

    def __str__(self) -> str:
        if self.error is None:
            return f"rank {self.rank} returned {self.value!r} and {_exit_text(self.exit_code)}"
        if self.error in ("ProcessDied", "DeadlinePassed", "Stopped"):
            return f"rank {self.rank} {self.message}"
        return f"rank {self.rank} failed with {self.error}: {self.message}\n{self.traceback}"


class RanksFailedError(RuntimeError):
    """Ranks raised, died or did not return. The text has the traceback of each.

    Attributes:
        failed: outcomes of the ranks that failed. The first one is the origin: a process that died,
            or else the first exception that does not blame another rank.
    """

    def __init__(self, failed: Sequence[Outcome]) -> None:
        self.failed = sorted(failed, key=_distance_from_origin)
        super().__init__("\n".join(str(outcome) for outcome in self.failed))


def run(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    deadline_s: float,
    backend: str | None = None,
    start_method: str = "forkserver",
    preload: Sequence[str] = (),
) -> list[Any]:
    """Calls `function(rank, *args)` on every rank and returns the results by rank.

    When a rank fails, the others get `GRACE_S` to end by themselves and are then stopped.

    Args:
        world_size: number of ranks.
        function: function at the top of a module. It, `args` and the results are pickled. `args`
            may hold semaphores and locks of multiprocessing.
        deadline_s: seconds until the ranks that have not returned are killed.
        backend: backend of the default process group. The group is set up, and torch gets one
            thread. None leaves both to `function`.
        start_method: way to start ranks. "forkserver" forks them from a server that has done the
            imports once. "spawn" starts fresh interpreters, which repeat the imports and end as a
            script does. "fork" copies this process.
        preload: modules that the server imports. Only the names in the process's first call count,
            since there is one server.

    Raises:
        RanksFailedError: a rank did not return, or crashed on its way out.
    """
    ranks = _Ranks(world_size, function, args, deadline_s, backend, start_method, tuple(preload))
    with ranks.started():
        for _ in ranks.items(grace_s=GRACE_S):
            raise AssertionError("only streams have items")
        return [outcome.value for outcome in ranks.successes()]


def outcomes(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    deadline_s: float,
    backend: str | None = None,
    start_method: str = "forkserver",
    preload: Sequence[str] = (),
) -> list[Outcome]:
    """Does the same as `run`, for ranks that may fail. Returns by rank how each one ended.

    A rank that fails does not shorten the time of the others.
    """
    ranks = _Ranks(world_size, function, args, deadline_s, backend, start_method, tuple(preload))
    with ranks.started():
        for _ in ranks.items(grace_s=None):
            raise AssertionError("only streams have items")
        return ranks.outcomes()


def stream(
    world_size: int,
    function: Callable[..., Iterator[Any]],
    *args: Any,
    deadline_s: float,
    backend: str | None = None,
    start_method: str = "forkserver",
    preload: Sequence[str] = (),
) -> Iterator[Any]:
    """Does the same as `run`, for a generator function. Yields what rank 0 yields, at once."""
    ranks = _Ranks(
        world_size, function, args, deadline_s, backend, start_method, tuple(preload), streams=True
    )
    with ranks.started():
        yield from ranks.items(grace_s=GRACE_S)
        ranks.successes()


class _Ranks:
    """The processes of one call, on the caller's side."""

    def __init__(
        self,
        world_size: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        deadline_s: float,
        backend: str | None,
        start_method: str,
        preload: tuple[str, ...],
        streams: bool = False,
    ) -> None:
        self._world_size = world_size
        self._task = _ByValue((function, args))
        self._deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s
        self._backend = backend
        self._streams = streams
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._outcomes: dict[int, Outcome] = {}
        self._context: Any = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload(list(preload))

    @contextmanager
    def started(self) -> Iterator[None]:
        """Starts the processes. Within the block they run, and after it there are none."""
        store = None
        if self._backend is not None:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        group = _Group(self._backend, store.port) if self._backend and store else None
        try:
            for rank in range(self._world_size):
                receiving, sending = self._context.Pipe(duplex=False)
                self._pipes.append(receiving)
                process = self._context.Process(
                    target=_rank_main,
                    args=(rank, self._world_size, self._task, group, sending, self._deadline_s),
                    kwargs={"streams": self._streams},
                )
                self._processes.append(process)
                with _signals_kept_waiting():
                    process.start()
                sending.close()  # so that the death of the process ends the pipe
            yield
        finally:
            for process in self._processes:
                if process.pid is not None:
                    process.kill()
            for process in self._processes:
                if process.pid is not None:
                    process.join()
                    process.close()
            for pipe in self._pipes:
                pipe.close()

    def items(self, grace_s: float | None) -> Iterator[Any]:
        """Yields what rank 0 streams, until all ranks have ended or the deadline has passed.

        Args:
            grace_s: seconds that remain after a rank has failed; None: until the deadline.
        """
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        error = "DeadlinePassed"
        while waiting and (left := self._end - time.monotonic()) > 0:
            for ready in wait(list(waiting), left):
                assert isinstance(ready, Connection)
                message = self._receive(ready, waiting[ready])
                if not isinstance(message, Outcome):
                    yield message.value
                    continue
                self._outcomes[waiting.pop(ready)] = message
                grace_end = time.monotonic() + grace_s if grace_s is not None else self._end
                if message.error is not None and grace_end < self._end:
                    self._end, error = grace_end, "Stopped"
        self._kill(list(waiting.values()), error)

    def _receive(self, pipe: Connection, rank: int) -> Outcome | _Item:
        try:
            message = pickle.loads(pipe.recv_bytes())
            assert isinstance(message, (Outcome, _Item))
            return message
        except (EOFError, ConnectionError):
            process = self._processes[rank]
            process.join(max(0.0, self._end - time.monotonic()))
            return Outcome(rank, error="ProcessDied", message=_exit_text(process.exitcode))

    def _kill(self, stuck: list[int], error: str) -> None:
        """Ends ranks that have not answered. Their stacks go to stderr."""
        if not stuck:
            return
        reason = (
            f"did not end in {self._deadline_s:g} s"
            if error == "DeadlinePassed"
            else f"did not end within {GRACE_S:g} s after another rank had failed"
        )
        for rank in stuck:
            pid = self._processes[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR1)
            text = f"{reason}: killed, its stacks are on stderr"
            self._outcomes[rank] = Outcome(rank, error=error, message=text)
        wait([self._processes[rank].sentinel for rank in stuck], _STACKS_S)

    def outcomes(self) -> list[Outcome]:
        """Returns the outcomes by rank, when no item is left."""
        ended = []
        for rank, process in enumerate(self._processes):
            outcome = self._outcomes[rank]
            if outcome.error not in ("DeadlinePassed", "Stopped"):
                process.join(max(0.0, self._end - time.monotonic()))
                outcome = replace(outcome, exit_code=process.exitcode)
            ended.append(outcome)
        return ended

    def successes(self) -> list[Outcome]:
        """Returns the outcomes by rank. Raises if a rank has failed."""
        ended = self.outcomes()
        failed = [each for each in ended if each.error is not None or each.exit_code != 0]
        if failed:
            raise RanksFailedError(failed)
        return ended


@contextmanager
def _signals_kept_waiting() -> Iterator[None]:
    """Delays signals' handlers until a fork is done. Python ignores exceptions of the functions
    that it calls around a fork. And if a start was interrupted, nobody would own the process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class _Item:
    """A value that rank 0 streams."""

    value: Any


@dataclass(frozen=True)
class _Group:
    """The default process group: its backend, and the address of its store."""

    backend: str
    port: int


class _ByValue:
    """A value that every rank gets a copy of.

    Tensors among the arguments of a multiprocessing process would be shared by the ranks. The value
    is pickled while a process is started: only then can semaphores be pickled.
    """

    def __init__(self, value: Any, pickled: bytes | None = None) -> None:
        self._value = value
        self._pickled = pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return _ByValue, (None, pickle.dumps(self._value))

    def get(self) -> Any:
        return self._value if self._pickled is None else pickle.loads(self._pickled)


def _rank_main(
    rank: int,
    world_size: int,
    task: _ByValue,
    group: _Group | None,
    answer: Connection,
    deadline_s: float,
    *,
    streams: bool,
) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    _end_with_the_caller()
    try:
        function, args = task.get()
        if group is not None:
            _join(group, rank, world_size, timedelta(seconds=deadline_s))
        value = function(rank, *args)
        if streams:
            for item in value:
                if rank == 0:
                    answer.send_bytes(pickle.dumps(_Item(item)))
            value = None
        outcome = pickle.dumps(Outcome(rank, value))
        exit_code = 0
    except BaseException as error:
        outcome = pickle.dumps(
            Outcome(
                rank,
                error=type(error).__name__,
                message=str(error),
                traceback=traceback.format_exc(),
                consequence=_is_consequence(error),
                ended_at=time.monotonic(),
            )
        )
        exit_code = 1
    answer.send_bytes(outcome)
    answer.close()
    if exit_code == 0:
        end_all()  # as a script does at its end; multiprocessing leaves without atexit
    sys.exit(exit_code)


def _end_with_the_caller() -> None:
    """Ends this process when its caller's end of a pipe closes, by the signal SIGIO."""
    caller = multiprocessing.parent_process()
    assert caller is not None
    pipe = caller.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if wait([pipe], 0):  # the pipe closed before, so that no signal comes
        os._exit(1)


def _join(group: _Group, rank: int, world_size: int, timeout: timedelta) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", group.port, timeout=timeout)
    dist.init_process_group(
        group.backend, store=store, rank=rank, world_size=world_size, timeout=timeout
    )
    # A rank that ends at once would close its connections while others still make theirs.
    joined = [f"torchrec_bls joined {each}" for each in range(world_size)]
    store.set(joined[rank], "")
    store.wait(joined, timeout)


def _is_consequence(error: BaseException) -> bool:
    return isinstance(error, (PeerClosedError, PeerDiedError, PoisonedError)) or (
        isinstance(error, RuntimeError) and "Connection closed by peer" in str(error)
    )


def _distance_from_origin(outcome: Outcome) -> tuple[int, float, int]:
    if outcome.error is None or outcome.error == "ProcessDied":
        distance = 0
    elif outcome.error in ("DeadlinePassed", "Stopped"):
        distance = 3
    else:
        distance = 2 if outcome.consequence else 1
    return distance, outcome.ended_at, outcome.rank


def _exit_text(code: int | None) -> str:
    if code is None:
        return "did not leave"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"

"""Work in a process of its own, which may hang, crash or lose its GPU without harm to the rest."""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.gpu.runtime import Runtime

# The server imports and never touches CUDA, which forked processes could not use then.
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = ("benchmarks.gpu.registrations", "benchmarks.gpu.gathers", "benchmarks.gpu.peers")
_GONE_S = 30.0
#: Why a case without time has no result.
LEFT_OUT = "left out: no time was left"

Open = Callable[[], Runtime]
Case = dict[str, Any]


class ChildError(RuntimeError):
    """A child raised, died or did not answer in time."""


class Child:
    """A process that calls `work(connection, *arguments)`. Leaving the context kills it.

    Args:
        work: function at the top of a module. It talks by the connection's `send` and `recv`.
        arguments: for it, pickled.
    """

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        _CONTEXT.set_forkserver_preload(list(_PRELOADED))
        self.connection, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_call, args=(theirs, work, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.connection.close()

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process.pid is not None
        return self._process.pid

    def send(self, message: Any) -> None:
        """Sends a message. A ChildError says that the child has gone."""
        try:
            self.connection.send(message)
        except OSError:
            raise ChildError(self._end()) from None

    def receive(self, deadline: float) -> Any:
        """The next message, until `time.monotonic()` passes the deadline."""
        start = time.monotonic()
        if not self.connection.poll(max(0.0, deadline - start)):
            raise ChildError(f"no answer for {time.monotonic() - start:.0f} s")
        try:
            kind, message = self.connection.recv()
        except (EOFError, OSError):
            raise ChildError(self._end()) from None
        if kind == "raised":
            raise ChildError(message)
        return message

    def kill(self) -> None:
        """Kills it and waits until it is gone, unless a driver keeps it."""
        self._process.kill()
        self._process.join(_GONE_S)

    def _end(self) -> str:
        self._process.join(5)
        return f"the process ended with {self._process.exitcode}"


class Reports:
    """What a child sends to its parent."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: Any) -> None:
        """Sends a message to `Child.receive`."""
        self._connection.send(("message", message))

    def receive(self) -> Any:
        """The parent's next message."""
        return self._connection.recv()

    def has_message(self) -> bool:
        """Whether `receive` would return at once."""
        return self._connection.poll()


def each_case(
    open_runtime: Open,
    work: Callable[..., Iterator[Case]],
    cases: Sequence[Case],
    case_s: float,
    deadline: float,
) -> Iterator[Case]:
    """Yields case and result for each result of `work(runtime, **case)`, of all cases in order.

    A process runs one case after the other. A case that raises, hangs or crashes has "failed" with
    the reason, and the following ones get a new process.

    Args:
        open_runtime: makes the process's Runtime.
        work: function at the top of a module.
        cases: its keyword arguments.
        case_s: seconds until a result of a case, process start included.
        deadline: of `time.monotonic()`, for all cases.
    """
    left = list(cases)
    while left and time.monotonic() < deadline:
        with Child(_run_cases, open_runtime, work, left) as child:
            try:
                while left:
                    result = child.receive(min(deadline, time.monotonic() + case_s))
                    if result is None:
                        left.pop(0)
                    else:
                        yield {**left[0], **result}
            except ChildError as error:
                yield {**left.pop(0), "failed": str(error)}
    yield from ({**case, "failed": LEFT_OUT} for case in left)


def _run_cases(
    reports: Reports, open_runtime: Open, work: Callable[..., Iterator[Case]], cases: list[Case]
) -> None:
    runtime = open_runtime()
    for case in cases:
        for result in work(runtime, **case):
            reports.send(result)
        reports.send(None)  # the case has ended


def _call(connection: Connection, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent kills its children
    try:
        work(Reports(connection), *arguments)
    except Exception as error:
        connection.send(("raised", _text(error)))


def _text(error: BaseException) -> str:
    """An error, where it was raised, and what it came after: giving back fails after a GPU does."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
    text = f"{type(error).__name__}: {error} ({place})"
    hidden = error.__suppress_context__ or error.__context__ is None
    return text if hidden else f"{text}, after {_text(error.__context__)}"


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

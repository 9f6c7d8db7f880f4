"""Processes that a test starts and tells what to do, one call after the other."""

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.direct import served
from tests.processes import run_outcomes
from torchrec_bls import attach, offer, publish, serving_state, version_of
from torchrec_bls.direct.offers.offer import Offer

DEADLINE = 60.0
# Module with the model that most tests serve.
FLOAT = "tests.direct.served"


class Node:
    """What a process of a test has.

    Attributes:
        rank: among those that shard.
        folder: of the sockets.
        name: by which the test calls it.
        model: that it serves.
        offers: its open ones.
        served: module with the model of the test, its weights and batches.
    """

    def __init__(self, rank: int, folder: str, served_by: str) -> None:
        self.rank = rank
        self.served: Any = import_module(served_by)
        self.folder = folder
        self.name: object = rank
        # To the test; None before `obey`.
        self.told_by: Connection | None = None
        self.model: Any = None
        self.offers: list[Offer] = []
        self.batches = self.served.batches_of(rank)
        self.expected = self.served.Expected(self.batches)

    def path_of(self, name: object) -> str:
        return f"{self.folder}/{name}"


class NodeFailedError(AssertionError):
    """A call raised in its process; the text is its traceback."""


class Nodes:
    """All processes of a test, by name; ranks are named by their numbers.

    Args:
        folder: for sockets.
        served_by: see Node.served.
        deadline: seconds until the processes must have ended.
    """

    def __init__(
        self, folder: Path, served_by: str = FLOAT, deadline: float = 3 * DEADLINE
    ) -> None:
        self._deadline = deadline
        self._folder = folder
        self._served_by = served_by
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.settimeout(DEADLINE)
        self._listener.bind(str(folder / "control"))
        self._listener.listen()
        self._connections: dict[object, Connection] = {}
        self._pool = ThreadPoolExecutor(24)
        self._running: list[Future[Any]] = []

    def start_ranks(self, count: int) -> None:
        """Starts ranks 0 to `count` - 1, which have a process group."""
        self._start(count, "gloo")

    def start(self, name: str) -> None:
        """Starts a process without a process group."""
        self._start(1, None, name)

    def _start(self, count: int, backend: str | None, *name: str) -> None:
        arguments = (count, _obey, str(self._folder), self._served_by, *name)
        self._running.append(
            self._pool.submit(run_outcomes, *arguments, deadline=self._deadline, backend=backend)
        )
        for _ in range(count):
            self.accept()

    def accept(self) -> None:
        """Waits for a process that says its name."""
        connection = Connection(self._listener.accept()[0].detach())
        assert connection.poll(DEADLINE)
        self._connections[connection.recv()] = connection

    def call(self, name: object, function: Callable[..., Any], *args: Any) -> Any:
        """Returns what `function(node, *args)` returns in a process."""
        self.begin(name, function, *args)
        return self.end(name)

    def call_all(self, names: Sequence[object], function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function in several processes at once, and returns the results."""
        for name in names:
            self.begin(name, function, *args)
        return [self.end(name) for name in names]

    def begin(self, name: object, function: Callable[..., Any], *args: Any) -> None:
        """Begins a call, which `end` waits for."""
        self._connections[name].send((function, args))

    def end(self, name: object) -> Any:
        """Returns what the call returns that was begun last."""
        connection = self._connections[name]
        assert connection.poll(DEADLINE), f"{name} does not answer"
        succeeded, result = connection.recv()
        if not succeeded:
            raise NodeFailedError(f"in {name}: {result}")
        return result

    def has_answered(self, name: object) -> bool:
        """Returns whether the call has ended that was begun last."""
        return self._connections[name].poll()

    def kill(self, name: object) -> None:
        """Kills a process, and returns when it is gone."""
        pid = self.call(name, pid_of)
        os.kill(pid, signal.SIGKILL)
        until(lambda: state_of(pid) in "ZX")

    def close(self) -> None:
        """Ends all processes."""
        for connection in self._connections.values():
            connection.close()
        for running in self._running:
            for outcome in running.result():
                assert outcome.error in (None, "ProcessDied"), str(outcome)
        self._pool.shutdown()
        self._listener.close()


@contextmanager
def started(folder: Path, ranks: int, served_by: str = FLOAT) -> Iterator[Nodes]:
    """Yields nodes with that many ranks, which serve version 1 and offer it."""
    nodes = Nodes(folder, served_by)
    try:
        nodes.start_ranks(ranks)
        nodes.call_all(range(ranks), serve)
        yield nodes
    finally:
        nodes.close()


def until(condition: Callable[[], bool], deadline: float = DEADLINE) -> None:
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _obey(rank: int, folder: str, served_by: str, name: str | None = None) -> None:
    torch.set_num_threads(1)
    obey(Node(rank, folder, served_by), rank if name is None else name)


def obey(node: Node, name: object) -> None:
    """Does what the test tells the process of that name, until the test ends."""
    told = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    told.connect(node.path_of("control"))
    if node.told_by is not None:  # this is a forked child: the parent's ends with the parent
        node.told_by.close()
    node.told_by = connection = Connection(told.detach())
    connection.send(name)
    node.name = name
    while True:
        try:
            function, args = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            connection.send((True, function(node, *args)))
        except SystemExit:
            raise
        except BaseException:
            connection.send((False, traceback.format_exc()))


# What nodes are told to do.


def pid_of(node: Node) -> int:
    return os.getpid()


def serve(node: Node) -> None:
    """Shards the model, looks a batch up, and offers the tables."""
    node.model = node.served.sharded()
    check(node, 1)
    node.offers.append(offer(node.model, node.path_of(node.rank)))


bare_model = served.bare_model


def join(node: Node, source: object, owner: int | None = None, offered_as: str = "") -> None:
    """Attaches to what `source` offers, and looks a batch up."""
    model = node.served.bare_model()
    attach(model, node.path_of(source), owner=owner, deadline=DEADLINE)
    node.model = model
    check(node)
    if offered_as:
        node.offers.append(offer(model, node.path_of(offered_as)))


def check(node: Node, version: int | None = None) -> int:
    """Compares all batches with the version that each says it is of; returns the last one."""
    seen = 0
    for number in range(len(node.batches)):
        seen = served.check(node.model, node.batches, node.expected, number)
        assert version is None or seen == version, (seen, version)
    return seen


def check_many(node: Node, times: int, ready: str) -> int:
    """Looks batches up for a while; creates a file when it has begun."""
    for number in range(times):
        if number == times // 10:
            Path(node.path_of(ready)).touch()
        served.check(node.model, node.batches, node.expected, number)
    return served.number_of(version_of(node.model))


def publish_all(node: Node, version: int, owner: int | None = None) -> None:
    """Publishes the whole weights of a version."""
    publication = publish(
        node.model,
        node.served.weights_of(version),
        version=str(version),
        owner=owner,
        deadline=DEADLINE,
    )
    assert publication.version == str(version) and not publication.was_announced


def go_over(node: Node, version: int) -> None:
    """Waits for a version and looks all batches up in it."""
    until(lambda: served.check(node.model, node.batches, node.expected, 0) == version)
    check(node, version)


def state(node: Node) -> Any:
    return serving_state(node.model)

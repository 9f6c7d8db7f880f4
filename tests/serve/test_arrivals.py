"""Requests that come while a batch runs have arrived when they came."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
import uvloop

from torchrec_bls.serve import connections as connections_module
from torchrec_bls.serve.arrivals import Arrivals, stamped
from torchrec_bls.serve.connections import arrived, connections, one_write

# Seconds by which the kernel's clock and Python's may differ here.
CLOCKS = 0.001
# Seconds in which nobody looks.
BUSY = 0.03
LENGTH = [(b"content-length", b"4")]
REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


@contextlib.contextmanager
def listening() -> Iterator[socket.socket]:
    with stamped(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A caller and the service's end of its connection."""
    with listening() as listener, socket.create_connection(listener.getsockname()) as caller:
        connection, _ = listener.accept()
        with connection:
            connection.setblocking(False)
            yield caller, connection


def sent(caller: socket.socket, data: bytes = b"request") -> tuple[float, float]:
    """Sends, and returns the moments before and after it."""
    before = time.monotonic()
    caller.sendall(data)
    return before, time.monotonic()


def is_within(moment: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] - CLOCKS <= moment <= bounds[1] + CLOCKS


def sent_between_looks(
    arrivals: Arrivals, caller: socket.socket, data: bytes = b"request"
) -> tuple[float, float]:
    """Sends while nobody looks, and looks. Returns the moments before and after sending."""
    arrivals.look()
    time.sleep(BUSY)
    came = sent(caller, data)
    time.sleep(BUSY)
    arrivals.look()
    return came


def test_who_is_found_at_once_has_arrived_now(pair: tuple[socket.socket, socket.socket]) -> None:
    caller, connection = pair
    arrivals = Arrivals()
    arrivals.watch(connection.fileno())
    sent(caller)
    before = time.monotonic()
    assert before <= arrivals.of(connection.fileno()) <= time.monotonic()
    assert before <= arrivals.earliest() <= time.monotonic()


@pytest.mark.parametrize("size", [1, 20_000, 200_000])
def test_who_waited_has_arrived_when_it_came(
    size: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    caller, connection = pair
    arrivals = Arrivals()
    arrivals.watch(connection.fileno())
    came = sent_between_looks(arrivals, caller, bytes(size))
    assert is_within(arrivals.of(connection.fileno()), came)
    received = 0
    while received < size:  # nothing was taken
        received += len(connection.recv(1 << 20))
    assert received == size
    # What comes now is found by the loop, after the look.
    assert arrivals.of(connection.fileno()) <= time.monotonic()
    arrivals.look()
    assert arrivals.of(connection.fileno()) >= came[1] + BUSY
    arrivals.rest()
    before = time.monotonic()
    assert arrivals.of(connection.fileno()) >= before


def test_data_of_a_connection_that_is_new_may_have_come_before_it(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    caller, connection = pair
    arrivals = Arrivals()
    came = sent_between_looks(arrivals, caller)
    arrivals.watch(connection.fileno())
    assert is_within(arrivals.of(connection.fileno()), came)


def test_a_new_connection_without_data_waits_for_what_comes_next(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    _, connection = pair
    arrivals = Arrivals()
    arrivals.look()
    time.sleep(BUSY)
    before = time.monotonic()
    arrivals.look()
    arrivals.watch(connection.fileno())
    assert arrivals.of(connection.fileno()) >= before


def test_without_stamps_it_came_after_the_look_before() -> None:
    """Sockets of a file system have none, and some kernels."""
    caller, connection = socket.socketpair()
    with caller, connection:
        arrivals = Arrivals()
        arrivals.watch(connection.fileno())
        arrivals.look()
        looked = time.monotonic()
        came = sent(caller)
        time.sleep(BUSY)
        arrivals.look()
        assert arrivals.of(connection.fileno()) <= looked <= came[0]
        assert arrivals.earliest() <= looked


def test_a_connection_that_is_closed_is_forgotten(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    caller, connection = pair
    arrivals = Arrivals()
    number = connection.fileno()
    arrivals.watch(number)
    caller.close()
    arrivals.look()  # it ends, which is no data
    connection.close()
    arrivals.look()
    with listening() as listener, socket.create_connection(listener.getsockname()) as other:
        again, _ = listener.accept()
        with again:
            again.setblocking(False)
            arrivals.watch(again.fileno())
            came = sent(other)
            time.sleep(BUSY)
            arrivals.look()
            assert arrivals.of(again.fileno()) <= came[1] + CLOCKS


def serving(check: Callable[[Arrivals, socket.socket], None]) -> list[float]:
    """Runs an HTTP server and a function beside it, in the loop's own thread. Returns when the
    requests arrived."""
    moments = []

    async def application(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        moments.append(arrived(scope))
        with one_write(scope):
            await send({"type": "http.response.start", "status": 200, "headers": LENGTH})
            await send({"type": "http.response.body", "body": b"body"})

    async def run() -> None:
        arrivals = Arrivals()
        config = uvicorn.Config(
            application, http=connections(arrivals), lifespan="off", log_config=None
        )
        server = uvicorn.Server(config)
        with listening() as listener:
            task = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            caller = socket.create_connection(listener.getsockname())
            with caller:
                caller.setblocking(False)
                await asyncio.get_running_loop().sock_sendall(caller, REQUEST)
                await asyncio.get_running_loop().sock_recv(caller, 1 << 16)
                check(arrivals, caller)
                await asyncio.get_running_loop().sock_recv(caller, 1 << 16)
            server.should_exit = True
            await task

    uvloop.run(run())
    return moments


def test_a_request_over_http_knows_when_it_came() -> None:
    came = []

    def busy(arrivals: Arrivals, caller: socket.socket) -> None:
        came.append(sent_between_looks(arrivals, caller, REQUEST))

    _, second = serving(busy)
    assert is_within(second, came[0])


class Noted:
    """A transport whose writes are noted."""

    def __init__(self, transport: asyncio.Transport, written: list[bytes]) -> None:
        self._transport = transport
        self._written = written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._written.append(data)
        self._transport.write(data)


def test_the_server_s_reply_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn alone makes two of it."""
    written: list[bytes] = []
    made = connections_module._Transport
    monkeypatch.setattr(
        connections_module, "_Transport", lambda transport: made(Noted(transport, written))
    )
    serving(lambda arrivals, caller: caller.sendall(REQUEST))
    assert len(written) == 2
    assert all(each.startswith(b"HTTP/1.1 200") and each.endswith(b"body") for each in written)

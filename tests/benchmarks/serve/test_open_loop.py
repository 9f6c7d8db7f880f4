"""What an open loop notes of servers that are slow, refuse, break off or say nothing."""

import asyncio
import contextlib
import struct
import threading
from collections.abc import Iterator

import pytest

from benchmarks.serve import open_loop
from benchmarks.serve.encoding import post
from benchmarks.serve.open_loop import MALFORMED, NOTHING, RESET, OpenLoop
from tests.benchmarks.serve.stand_in import (
    Serve,
    answering,
    read_head,
    read_request,
    response,
    stand_in,
)

REQUEST = post("/", b"x" * 100)


def looped(
    serve: Serve,
    due: list[float],
    connections: int = 1,
    requests: list[bytes] | None = None,
) -> OpenLoop:
    with stand_in(serve) as port:
        loop = OpenLoop(("127.0.0.1", port), requests or [REQUEST], due, connections, keep=True)
        loop.run()
    return loop


def test_latency_counts_from_the_intended_send() -> None:
    pause = 0.1
    loop = looped(answering(response(), pause), [0.0] * 5)
    # Each waits in the generator for those before it. From its true send it would take one pause.
    assert [latency >= pause * turn for turn, latency in enumerate(loop.latency, 1)] == [True] * 5
    assert list(loop.status) == [200] * 5
    assert loop.sent == 5
    # No connection was free for the others: that is the server's delay, not the generator's.
    assert len(loop.lags) == 1


def test_nothing_goes_out_before_its_moment() -> None:
    arrived = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            arrived.append(asyncio.get_running_loop().time())
            writer.write(response())

    loop = looped(serve, [0.0, 0.1, 0.3], connections=2)
    assert arrived[2] - arrived[0] >= 0.25
    assert len(loop.lags) == 3
    assert min(loop.lags) >= 0.0


def test_requests_are_sent_in_turn_and_answers_are_kept() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, body = await read_request(reader)
            writer.write(response(200 if body != b"b" else 503, body))

    loop = looped(echo, [0.0] * 5, 2, [post("/", body) for body in (b"a", b"b", b"c")])
    assert list(loop.status) == [200, 503, 200, 200, 503]
    kept = {turn: whole.rpartition(b"\r\n\r\n")[2] for turn, whole in loop.kept}
    assert kept == {0: b"a", 2: b"c", 3: b"a"}


def test_a_request_larger_than_the_buffers_arrives_whole() -> None:
    body = bytes(range(256)) * (1 << 16)

    async def compare(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, found = await read_request(reader)
            writer.write(response(200 if found == body else 400))

    loop = looped(compare, [0.0, 0.0, 0.0], 1, [post("/", body)])
    assert list(loop.status) == [200] * 3


def test_a_refusal_before_the_body_is_read_leaves_the_connection_usable() -> None:
    body = bytes(16 << 20)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await read_head(reader)
            writer.write(response(503))
            await writer.drain()
            await asyncio.sleep(0.1)
            await reader.readexactly(int(head["content-length"]))

    loop = looped(refuse, [0.0, 0.0], 1, [post("/", body)])
    assert list(loop.status) == [503, 503]


def test_closed_connections_are_opened_again() -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(response(200, b"", "Connection: close\r\n"))
        await writer.drain()

    loop = looped(once, [0.0] * 6, 2)
    assert list(loop.status) == [200] * 6


async def _reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(1, 13, linger)  # SOL_SOCKET, SO_LINGER


async def _close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    writer.write(response(200, b"x" * 10)[:-1])
    await writer.drain()


@pytest.mark.parametrize("serve", [_reset, _close])
def test_who_is_broken_off_has_failed_and_the_next_goes_on(serve: Serve) -> None:
    loop = looped(serve, [0.0, 0.05, 0.1], 1)
    assert list(loop.status) == [RESET] * 3


@pytest.mark.parametrize("reply", [b"HTTP/1.1 200 OK\r\n\r\n", response() + b"x", b"junk\r\n\r\n"])
def test_what_is_no_response_has_failed(reply: bytes) -> None:
    assert list(looped(answering(reply), [0.0, 0.1]).status) == [MALFORMED] * 2


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(open_loop, "GIVE_UP_S", 0.2)
    yield


@pytest.mark.usefixtures("short_patience")
def test_nothing_within_the_time_is_given_up_in_flight_and_in_the_queue() -> None:
    loop = looped(answering(response(), 30.0), [0.0] * 4, 2)
    assert list(loop.status) == [NOTHING] * 4
    assert all(latency >= 0.2 for latency in loop.latency)


@pytest.mark.usefixtures("short_patience")
def test_a_server_that_ends_fails_what_is_left() -> None:
    end = threading.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(response())
        end.set()

    with contextlib.ExitStack() as running:
        port = running.enter_context(stand_in(serve))
        loop = OpenLoop(("127.0.0.1", port), [REQUEST], [0.0, 1.0, 1.1], 1, keep=False)
        thread = threading.Thread(target=loop.run)
        thread.start()
        assert end.wait(30)
        running.close()
        thread.join(30)
    assert not thread.is_alive()
    assert list(loop.status) == [200, NOTHING, NOTHING]


def test_a_server_that_is_not_there_is_named() -> None:
    with stand_in(answering(response())) as port:
        pass
    with pytest.raises(ConnectionError, match=f"nothing answers at 127.0.0.1:{port} .*start"):
        OpenLoop(("127.0.0.1", port), [REQUEST], [0.0], 1, keep=False).run()

"""A server of the wire alone, that answers as a test says."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
#: Serves one connection, until it returns.
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def response(status: int = 200, body: bytes = b"", extra: str = "") -> bytes:
    return f"HTTP/1.1 {status} Any\r\nContent-Length: {len(body)}\r\n{extra}\r\n".encode() + body


async def read_head(reader: asyncio.StreamReader) -> dict[str, str]:
    """The headers of the next request, by small names, and its path as the name ""."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return {"": first.split()[1], **{name.lower(): value for name, value in headers.items()}}


async def read_request(reader: asyncio.StreamReader) -> tuple[dict[str, str], bytes]:
    head = await read_head(reader)
    return head, await reader.readexactly(int(head["content-length"]))


def answering(reply: bytes, after_s: float = 0.0) -> Serve:
    """Answers each request with the same bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            await asyncio.sleep(after_s)
            writer.write(reply)

    return serve


@contextlib.contextmanager
def stand_in(serve: Serve) -> Iterator[int]:
    """Runs a server in a thread of this process, as long as the context lasts; gives its port."""
    loop = asyncio.new_event_loop()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.close()

    async def run(started: threading.Event) -> None:
        nonlocal port
        server = await asyncio.start_server(one, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    port, started = 0, threading.Event()
    main = loop.create_task(run(started))
    thread = threading.Thread(target=loop.run_until_complete, args=(main,))
    thread.start()
    try:
        assert started.wait(30)
        yield port
    finally:
        loop.call_soon_threadsafe(main.cancel)
        thread.join(30)
        assert not thread.is_alive()
        loop.close()

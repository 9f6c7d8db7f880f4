"""Connections of HTTP."""

import asyncio
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from torchrec_bls.serve.arrivals import Arrivals

# Where the state of a request has its connection, and says when it arrived.
_CONNECTION, _ARRIVED = "connection", "arrived"


def connections(arrivals: Arrivals) -> type[asyncio.Protocol]:
    """Returns the class of uvicorn's connections. They note when requests arrive.

    Args:
        arrivals: who knows it.
    """

    class Connection(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.transport: _Transport = _Transport(transport)  # type: ignore[assignment]
            self.number = transport.get_extra_info("socket").fileno()
            arrivals.watch(self.number)
            self.when_lost: Callable[[], None] | None = None

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self.when_lost is not None:
                self.when_lost()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["state"][_ARRIVED] = arrivals.of(self.number)
            self.scope["state"][_CONNECTION] = self

    return Connection


class _Transport:
    """A transport whose writes within the context of it leave as one."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held: list[bytes] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._held is None:
            self._transport.write(data)
        else:
            self._held.append(data)

    def close(self) -> None:
        self._release()
        self._transport.close()

    def __enter__(self) -> None:
        self._held = []

    def __exit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        held, self._held = self._held, None
        if held:
            self._transport.write(b"".join(held))


def one_write(scope: MutableMapping[str, Any]) -> AbstractContextManager[None]:
    """Returns a context, of which all that is sent leaves at once. uvicorn writes the head of a
    reply before its body, and a worker that dies in between would have sent half of it.

    Args:
        scope: scope of the request, as ASGI has it.
    """
    transport: _Transport = scope["state"][_CONNECTION].transport
    return transport


def arrived(scope: MutableMapping[str, Any]) -> float:
    """Returns when a request arrived, in seconds of `time.monotonic()`.

    Args:
        scope: its scope, as ASGI has it.
    """
    return float(scope["state"][_ARRIVED])


@contextmanager
def told_when_gone(scope: MutableMapping[str, Any], tell: Callable[[], None]) -> Iterator[None]:
    """Has a function called if the caller leaves within the context. ASGI has a task wait for that,
    which would be made and cancelled for each request.

    Args:
        scope: scope of the caller's request, whose body was read.
        tell: the function.
    """
    connection = scope["state"][_CONNECTION]
    connection.when_lost = tell
    try:
        yield
    finally:
        connection.when_lost = None

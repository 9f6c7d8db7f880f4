"""Connections of HTTP."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from torchrec_bls.serve.arrivals import Arrivals

# Where the state of a request says when it arrived.
_ARRIVED = "arrived"


def connections(arrivals: Arrivals) -> type[asyncio.Protocol]:
    """Returns the class of uvicorn's connections. They note when requests arrive.

    Args:
        arrivals: who knows it.
    """

    class Connection(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.number = transport.get_extra_info("socket").fileno()
            arrivals.watch(self.number)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["state"][_ARRIVED] = arrivals.of(self.number)

    return Connection


def arrived(scope: MutableMapping[str, Any]) -> float:
    """Returns when a request arrived, in seconds of `time.monotonic()`.

    Args:
        scope: its scope, as ASGI has it.
    """
    return float(scope["state"][_ARRIVED])

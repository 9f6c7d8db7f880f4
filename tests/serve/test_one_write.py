"""A reply leaves in one write, so that no process dies in between."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchrec_bls.serve.connections import _Transport, one_write


class Recorded:
    """A transport that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.told.append(data)

    def close(self) -> None:
        self.told.append("close")

    def is_closing(self) -> bool:
        return "close" in self.told


def connected() -> tuple[Recorded, Any, dict[str, Any]]:
    """Returns what is told, the connection's transport, and the scope of a request."""
    recorded = Recorded()
    transport: Any = _Transport(recorded)  # type: ignore[arg-type]
    return recorded, transport, {"state": {"connection": SimpleNamespace(transport=transport)}}


def test_head_and_body_leave_together() -> None:
    recorded, transport, scope = connected()
    with one_write(scope):
        transport.write(b"head ")
        transport.write(b"body")
        assert recorded.told == []
    assert recorded.told == [b"head body"]


def test_the_end_of_a_connection_comes_after_its_last_reply() -> None:
    recorded, transport, scope = connected()
    with one_write(scope):
        transport.write(b"head ")
        transport.write(b"body")
        transport.close()
        assert transport.is_closing()
    assert recorded.told == [b"head body", "close"]


def test_what_was_written_before_an_error_is_sent() -> None:
    recorded, transport, scope = connected()
    with pytest.raises(KeyError), one_write(scope):
        transport.write(b"head")
        raise KeyError
    transport.write(b"more")
    assert recorded.told == [b"head", b"more"]


def test_nothing_is_held_else() -> None:
    recorded, transport, scope = connected()
    with one_write(scope):
        pass
    transport.write(b"100 Continue")
    assert recorded.told == [b"100 Continue"]

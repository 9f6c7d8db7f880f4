"""Messages between the supervisor and its processes."""

import os
import socket
from collections.abc import Iterator

import pytest

from torchrec_bls.serve.channel import (
    Attach,
    Beat,
    Begun,
    Channel,
    Failed,
    Fork,
    Message,
    Ready,
    Status,
    pair,
)
from torchrec_bls.serve.status import Refreshes

MESSAGES: list[Message] = [
    Ready(),
    Failed("the model can't be built"),
    Begun(7),
    Beat(),
    Attach(),
    Fork("3a"),
    Status(Refreshes(2, "no memory"), 2, 1, {"death": 4}, is_leaving=True),
]


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    here, there = pair()
    other = Channel(there)
    yield here, other
    here.close()
    other.close()


def test_all_messages_arrive_whole_and_in_order(ends: tuple[Channel, Channel]):
    here, there = ends
    assert all(here.send(each) for each in MESSAGES)
    assert there.received() == MESSAGES
    assert there.received() == []


def test_sockets_come_along(ends: tuple[Channel, Channel]):
    here, there = ends
    mine, sent = socket.socketpair()
    with mine, sent:
        here.send(Fork("1b"), sent)
        message, [copy] = there.receive()
    assert message == Fork("1b")
    with copy:
        assert copy.recv(1) == b""  # its other end is closed
        copy_is_own = os.fstat(copy.fileno())
        assert copy_is_own


def test_the_end_of_the_other_process_is_the_last_message(ends: tuple[Channel, Channel]):
    here, there = ends
    here.send(Beat())
    here.close()
    assert there.received() == [Beat(), None]
    with pytest.raises(EOFError):
        there.receive()
    assert not there.send(Ready())


def test_a_process_that_does_not_read_holds_nobody_up(ends: tuple[Channel, Channel]):
    here, there = ends
    sent = 0
    while here.send(Beat()):
        sent += 1
        assert sent < 100_000
    assert there.received() == [Beat()] * sent
    assert here.send(Ready()) and there.received() == [Ready()]


def test_an_end_may_be_full_and_closed(ends: tuple[Channel, Channel]):
    here, there = ends
    while here.send(Beat()):
        pass
    there.close()
    assert not here.send(Beat())
    assert here.received()[-1] is None

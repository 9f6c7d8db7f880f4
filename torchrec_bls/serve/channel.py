"""Messages between the supervisor and the processes that it has started."""

import socket
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from torchrec_bls.serve.status import Status

# Bytes that a message may have. A socket takes some of them until it is full.
_MOST_BYTES = 1 << 16


class Ready(msgspec.Struct, tag=True):
    """Of a zygote: it can be forked."""


class Failed(msgspec.Struct, tag=True):
    """Of a zygote: the model can't be served.

    Attributes:
        text: why.
    """

    text: str


class Begun(msgspec.Struct, tag=True):
    """Of a worker: it is there.

    Attributes:
        pid: its process.
    """

    pid: int


class Beat(msgspec.Struct, tag=True):
    """Of a worker: it answers requests, and its loop runs."""


class Attach(msgspec.Struct, tag=True):
    """To a zygote: the tables can be attached to."""


class Fork(msgspec.Struct, tag=True):
    """To a zygote: make a worker, which gets the socket that comes along.

    Attributes:
        name: name of the worker.
    """

    name: str


Message = Ready | Failed | Begun | Beat | Attach | Fork | Status
_decoder: "msgspec.json.Decoder[Message]" = msgspec.json.Decoder(Message)
_encode = msgspec.json.Encoder().encode


class Channel:
    """One end of a connection of two processes. A send never waits: who does not read loses what
    has no room, so only what is sent again may be sent often.

    Args:
        end: a socket of `pair`.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def send(self, message: Message, *sockets: socket.socket) -> bool:
        """Sends a message, with sockets that the other one gets copies of. Returns whether it has
        been sent: the other one may have ended, or not read for long."""
        descriptors = array("i", [each.fileno() for each in sockets])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)] if sockets else []
        try:
            # Not by send_fds, which passes flags over.
            self.socket.sendmsg([_encode(message)], rights, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionError):
            return False
        return True

    def receive(self) -> "tuple[Message, Sequence[socket.socket]]":
        """Returns the next message, and the sockets that came along. It waits for one.

        Raises:
            EOFError: the other one has ended, or has closed its end.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(self.socket, _MOST_BYTES, 4)
        except ConnectionError:
            data, descriptors = b"", []
        sockets = [socket.socket(fileno=each) for each in descriptors]
        if not data:
            raise EOFError("the other process has ended")
        return _decoder.decode(data), sockets

    def received(self) -> "list[Any]":
        """Returns all messages that have come, without waiting. The last one is None if the other
        process has ended."""
        found: list[Any] = []
        self.socket.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                try:
                    found.append(self.receive()[0])
                except EOFError:
                    found.append(None)
                    break
        self.socket.setblocking(True)
        return found

    def close(self) -> None:
        """Closes this end."""
        self.socket.close()


def pair() -> tuple[Channel, socket.socket]:
    """Returns an end for this process, and the one for the other process."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(here), there

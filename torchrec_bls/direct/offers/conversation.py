"""Bytes and descriptors between two processes of one user, through a Unix socket.

Both first say which version they speak. Every wait ends at a deadline.
"""

import array
import errno
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from torchrec_bls.errors import PeerDiedError, PeerTimeoutError, ProtocolError, RendezvousError
from torchrec_bls.lifetime import kept_from_children
from torchrec_bls.records import decode

#: Of the messages and the manifest in them.
VERSION = 4

_MAGIC = b"tbbloffr"
_VERSION = struct.Struct("<8sI")
# Number of descriptors that follow, and bytes of the text.
_SIZES = struct.Struct("<IQ")
_CREDENTIALS = struct.Struct("iII")
_LONGEST_TEXT = 64 << 20
_MOST_DESCRIPTORS = 1 << 16
# Most descriptors in one message; Linux takes 253.
_STEP = 128
_RECEIVED_AT_ONCE = 1 << 20
_ONE_DESCRIPTOR = b"d"
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
# Seconds between two tries to connect to a process with a full queue.
_PAUSE = 0.005

T = TypeVar("T")


class Descriptors:
    """Descriptors that came from another process, until `close` closes them all.

    Native code that keeps one keeps a duplicate. So a descriptor has one owner all the time, and an
    exception between two steps leaves none open.
    """

    def __init__(self) -> None:
        self._open: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, descriptors: Sequence[int]) -> None:
        """Adds descriptors after the others."""
        self._open.extend(descriptors)

    def take(self) -> int:
        """Returns the next descriptor, which stays open until `close`."""
        self._next += 1
        return self._open[self._next - 1]

    def close(self) -> None:
        """Closes all descriptors."""
        while self._open:
            os.close(self._open.pop())


class Conversation:
    """One connection, from either end.

    Args:
        connected: socket, which `close` closes.
        where: path of the socket, for messages.
        deadline: seconds for the whole conversation.
    """

    def __init__(self, connected: socket.socket, where: str, deadline: float) -> None:
        self._socket = connected
        self._where = where
        self._deadline = deadline
        self._end = time.monotonic() + deadline

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    def peer(self) -> int:
        """Returns the process id of the other end.

        Raises:
            ProtocolError: the other process is another user's.
        """
        found = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, user, _ = _CREDENTIALS.unpack(found)
        if user != os.geteuid():
            raise ProtocolError(
                f"process {pid} at the other end of {self._where} is of user {user}, but this one "
                f"of user {os.geteuid()}: tables are shared by processes of one user only"
            )
        return int(pid)

    def greet(self) -> None:
        """Says which version this process speaks."""
        self._send(_VERSION.pack(_MAGIC, VERSION))

    def be_greeted(self) -> None:
        """Reads which version the other process speaks.

        Raises:
            ProtocolError: it speaks another version, or nothing of this kind.
        """
        magic, version = _VERSION.unpack(self._receive(_VERSION.size))
        if magic != _MAGIC:
            raise ProtocolError(
                f"what speaks through {self._where} is no process of torchrec-bls: give offer() a "
                "path of its own"
            )
        if version != VERSION:
            raise ProtocolError(
                f"the process at the other end of {self._where} speaks version {version} of the "
                f"manifest of tables, and this one {VERSION}: install one version of torchrec-bls "
                "in both"
            )

    def send(self, content: Any, descriptors: Sequence[int]) -> None:
        """Sends content for JSON, and descriptors."""
        text = json.dumps(content).encode()
        self._send(_SIZES.pack(len(descriptors), len(text)) + text)
        for first in range(0, len(descriptors), _STEP):
            step = array.array("i", descriptors[first : first + _STEP])
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, step)]
            self._wait(partial(self._socket.sendmsg, [_ONE_DESCRIPTOR], rights))

    def receive(self, descriptors: Descriptors) -> Any:
        """Returns the content that `send` sent, and adds its descriptors to `descriptors`.

        Raises:
            ProtocolError: the message was cut off, or is something else.
            RendezvousError: this process can't have so many descriptors.
        """
        count, length = _SIZES.unpack(self._receive(_SIZES.size))
        if length > _LONGEST_TEXT or count > _MOST_DESCRIPTORS:
            raise ProtocolError(
                f"{self._where} announces {length} bytes and {count} descriptors, more than there "
                "can be: install one version of torchrec-bls in both processes"
            )
        text = self._receive(length)
        for first in range(0, count, _STEP):
            self._receive_descriptors(min(_STEP, count - first), descriptors)
        where = f"{self._where} sends no manifest, it"
        return decode(text, object, where, "install one version of torchrec-bls", ProtocolError)

    def _receive_descriptors(self, count: int, descriptors: Descriptors) -> None:
        room = socket.CMSG_SPACE(count * array.array("i").itemsize)
        receive = partial(self._socket.recvmsg, 1, room, socket.MSG_CMSG_CLOEXEC)
        came = array.array("i")
        ancillary: list[tuple[int, int, bytes]] = []
        try:
            data, ancillary, flags, _ = self._wait(receive)
        finally:  # they are open from here on, whatever comes now
            for level, kind, rights in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    came.frombytes(rights[: len(rights) - len(rights) % came.itemsize])
            descriptors.add(came)
        if not data:
            raise self._gone()
        if flags & socket.MSG_CTRUNC:
            raise RendezvousError(
                f"{self._where} hands {count} descriptors over, of which this process could take "
                f"{len(came)}: raise the limit of open files (ulimit -n)"
            )
        if len(came) != count:
            raise ProtocolError(
                f"{self._where} announces {count} descriptors and hands {len(came)} over: install "
                "one version of torchrec-bls in both processes"
            )

    def _send(self, data: bytes) -> None:
        self._wait(partial(self._socket.sendall, data))

    def _receive(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            step = min(count - len(received), _RECEIVED_AT_ONCE)
            part = self._wait(partial(self._socket.recv, step))
            if not part:
                raise self._gone()
            received += part
        return bytes(received)

    def _wait(self, act: Callable[[], T]) -> T:
        # A timeout of 0 would mean no timeout.
        self._socket.settimeout(max(1e-3, self._end - time.monotonic()))
        try:
            return act()
        except TimeoutError as error:
            raise PeerTimeoutError(
                f"the process at the other end of {self._where} did not answer within "
                f"{self._deadline} s: it is stopped or stuck"
            ) from error
        except ConnectionError as error:
            raise self._gone() from error
        except OSError as error:
            raise RendezvousError(f"cannot hand tables over at {self._where}: {error}") from error

    def _gone(self) -> PeerDiedError:
        return PeerDiedError(
            f"the process at the other end of {self._where} ended, or hung up, while tables were "
            "handed over: look at its output, and attach to another one"
        )


def connect(path: str, deadline: float) -> Conversation:
    """Connects to the process that offers tables at a path.

    Raises:
        RendezvousError: no process offers tables there.
        ProtocolError: the process is another user's.
        PeerTimeoutError: the process takes no connection.
    """
    end = time.monotonic() + deadline
    while True:
        try:
            connecting = kept_from_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        except OSError as error:
            raise RendezvousError(_why_nobody(path, error)) from error
        try:
            connecting.settimeout(max(1e-3, end - time.monotonic()))
            connecting.connect(path)
            conversation = Conversation(connecting, path, end - time.monotonic())
            conversation.peer()
            return conversation
        except (BlockingIOError, TimeoutError) as error:
            connecting.close()
            if time.monotonic() >= end:
                raise PeerTimeoutError(
                    f"the process that offers tables at {path} takes no connection within "
                    f"{deadline} s: it is stopped or stuck"
                ) from error
            time.sleep(_PAUSE)
        except BaseException as error:
            connecting.close()
            if isinstance(error, OSError) and not isinstance(error, PeerTimeoutError):
                raise RendezvousError(_why_nobody(path, error)) from error
            raise


def _why_nobody(path: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"nobody offers tables at {path}: there is no such socket. Call offer(model) there"
    if isinstance(error, ConnectionRefusedError):
        return (
            f"nobody listens at {path}: the process that offered tables there is gone. Attach to "
            "another one that serves them"
        )
    if isinstance(error, PermissionError):
        return f"{path} is another user's: tables are shared by processes of one user only"
    cure = ". Raise the limit of open files (ulimit -n)" if error.errno in _NO_DESCRIPTOR else ""
    return f"cannot connect to {path}: {error}{cure}"

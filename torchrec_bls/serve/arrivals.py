"""When requests arrived that waited in their sockets for the end of a batch."""

import select
import socket
import struct
import time
from collections import deque

# Has the kernel keep the moment at which data came; Python has no name for it.
_SO_TIMESTAMPNS = 35
_MOMENT = struct.Struct("@qq")
_TOLD = socket.CMSG_SPACE(_MOMENT.size)
# Bytes that are looked at: a stamp comes with the last byte of a packet. They are not copied.
_PEEKED = 1 << 16
_NO_COPY = socket.MSG_PEEK | socket.MSG_TRUNC
# The last look is not over, and the one before has found the requests that are read now.
_LOOKS = 3


def stamped(listener: socket.socket) -> socket.socket:
    """Returns a socket, of whose connections the kernel notes when data comes."""
    listener.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    return listener


class Arrivals:
    """Says when requests arrived. The thread that reads them runs batches as well, so that it finds
    them by milliseconds later; counted from then on, a deadline would be missed.

    Whoever runs batches calls `look` before each turn of the event loop, and `rest` before the
    thread waits for requests alone. Of connections that are watched a look notes what the kernel
    says of their next data, before the loop takes it. Without that it is as good as the looks.
    """

    def __init__(self) -> None:
        self._ready = select.epoll()
        self._peeked = bytearray(_PEEKED)
        self._looks: deque[float] = deque(maxlen=_LOOKS)
        # By file descriptors, of the last look.
        self._stamps: dict[int, float] = {}

    def watch(self, connection: int) -> None:
        """Looks at a connection from now on, until it is closed.

        Args:
            connection: its file descriptor; of a socket of TCP.
        """
        self._ready.register(connection, select.EPOLLIN)
        if self._looks:
            # What was sent with the first packets may have come before the last look.
            now, earliest = time.monotonic(), self._looks[0]
            stamp = self._stamp(connection, time.time() - now, earliest, nothing=self._looks[-1])
            self._stamps[connection] = min(max(earliest, stamp), now)

    def look(self) -> None:
        """Notes when the data came that the loop reads next."""
        now = time.monotonic()
        since = self._looks[-1] if self._looks else now
        self._looks.append(now)
        clock = time.time() - now
        self._stamps = {
            connection: min(max(since, self._stamp(connection, clock, since, since)), now)
            for connection, _ in self._ready.poll(0)
        }

    def rest(self) -> None:
        """Says that the loop finds from now on what comes."""
        self._looks.clear()
        self._stamps.clear()

    def of(self, connection: int) -> float:
        """Returns when the data arrived that was just read from a connection, in seconds of
        `time.monotonic()`."""
        if not self._looks:
            return time.monotonic()
        return self._stamps.get(connection, self._looks[-1])

    def earliest(self) -> float:
        """Returns the earliest moment at which any request may have arrived that is found now."""
        return self._looks[0] if self._looks else time.monotonic()

    def _stamp(self, connection: int, clock: float, unknown: float, nothing: float) -> float:
        """Returns when the next data of a connection came.

        Args:
            connection: its file descriptor.
            clock: seconds from `time.monotonic()` to `time.time()`.
            unknown: what is returned if the kernel does not say it.
            nothing: what is returned if there is none.
        """
        peer = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, connection)
        try:
            _, told, _, _ = peer.recvmsg_into([self._peeked], _TOLD, _NO_COPY)
        except OSError:  # the loop finds what is wrong with it
            return nothing
        finally:
            peer.detach()
        for level, kind, data in told:
            if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS) and len(data) == _MOMENT.size:
                seconds, nanoseconds = _MOMENT.unpack(data)
                return float(seconds - clock + nanoseconds / 1e9)
        return unknown

"""An open loop: each request goes out at its intended moment, however late the answers are.

One thread, one epoll. Nothing spins: a process with SCHED_FIFO that never sleeps is stopped by the
kernel for 50 ms of each second.
"""

import errno
import select
import socket
import time
from array import array
from collections import deque
from collections.abc import Sequence

from benchmarks.serve.responses import Malformed, Response

#: A request without an answer so long after its intended moment has failed.
GIVE_UP_S = 2.0
#: In place of a status.
RESET, NOTHING, MALFORMED = -1, -2, -3

_CHECK_S = 0.05
_RECONNECT_S = 0.1
# Few, so that what is due meanwhile goes out soon.
_EVENTS = 8
_READ = select.EPOLLIN
_READ_WRITE = select.EPOLLIN | select.EPOLLOUT


class _Connection:
    """A connection, and the request that it carries.

    Attributes:
        request: index of the request that waits for its answer; None: there is none.
        rest: what is still to be sent of a request. It outlives an answer that comes earlier.
        writes: whether epoll tells when it can be sent.
    """

    __slots__ = ("connected", "request", "response", "rest", "socket", "writes")

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.request: int | None = None
        self.response = Response()
        self.rest: memoryview | None = None
        self.connected = self.writes = False


class OpenLoop:
    """Sends `requests` in turn at the moments `due`, and notes what becomes of each.

    Args:
        address: host and port.
        requests: encoded; that of moment i is requests[i % len(requests)].
        due: intended moments, in seconds from the begin, sorted.
        connections: how many are kept open.
        keep: whether to keep answers.

    Attributes:
        status: by moment, that of the response, or RESET, NOTHING or MALFORMED.
        latency: by moment, seconds from the intended send to the end of the response.
        lags: seconds from the intended to the true send of each that found a connection free.
        sent: number of requests that went out.
        kept: whole responses with status 200, with the index of their moment.
    """

    def __init__(
        self,
        address: tuple[str, int],
        requests: Sequence[bytes],
        due: Sequence[float],
        connections: int,
        keep: bool,
    ) -> None:
        self.status = array("i", [0]) * len(due)
        self.latency = array("d", [0.0]) * len(due)
        self.lags = array("d")
        self.sent = 0
        self.kept: list[tuple[int, bytes]] = []
        self._address, self._requests, self._due = address, requests, due
        self._count, self._keep = connections, keep
        self._next, self._unfinished = 0, len(due)
        self._waiting: deque[int] = deque()
        self._free: deque[_Connection] = deque()
        self._by_descriptor: dict[int, _Connection] = {}
        self._to_connect: deque[float] = deque()
        self._start, self._checked = 0.0, 0.0

    def run(self) -> None:
        """Runs to the last answer, or to the moment at which the last request is given up.

        Raises:
            ConnectionError: the server can't be reached at the begin.
        """
        self._epoll = select.epoll()
        try:
            self._connect_all()
            self._start = time.perf_counter()
            while self._unfinished:
                self._step()
        finally:
            for connection in self._by_descriptor.values():
                connection.socket.close()
            self._epoll.close()

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _step(self) -> None:
        self._send_due()
        events = self._epoll.poll(0, _EVENTS)
        if not events:
            # epoll's own timeout has whole milliseconds, that of select has microseconds.
            until = self._checked + _CHECK_S
            if self._next < len(self._due):
                until = min(until, self._due[self._next])
            wait = until - self._now()
            if wait > 0:
                select.select([self._epoll], [], [], wait)
        for descriptor, event in events:
            connection = self._by_descriptor.get(descriptor)
            if connection is not None:
                self._take(connection, event)
        if self._now() >= self._checked + _CHECK_S:
            self._check()

    def _send_due(self) -> None:
        while self._waiting and self._free:
            self._send(self._free.popleft(), self._waiting.popleft())
        now = self._now()
        while self._next < len(self._due) and self._due[self._next] <= now:
            request, self._next = self._next, self._next + 1
            if self._free:
                self.lags.append(self._now() - self._due[request])
                self._send(self._free.popleft(), request)
            else:
                self._waiting.append(request)

    def _send(self, connection: _Connection, request: int) -> None:
        connection.request = request
        connection.rest = memoryview(self._requests[request % len(self._requests)])
        self.sent += 1
        self._send_rest(connection)

    def _send_rest(self, connection: _Connection) -> None:
        assert connection.rest is not None
        try:
            connection.rest = connection.rest[connection.socket.send(connection.rest) :]
        except BlockingIOError:
            pass
        except OSError:
            self._lose(connection, RESET)
            return
        unsent = connection.rest.nbytes > 0
        if connection.writes != unsent:
            connection.writes = unsent
            self._epoll.modify(connection.socket, _READ_WRITE if unsent else _READ)
        if not unsent:
            connection.rest = None
            if connection.request is None:
                self._free.append(connection)

    def _take(self, connection: _Connection, event: int) -> None:
        if not connection.connected:
            self._take_connected(connection)
            return
        if event & ~select.EPOLLOUT:
            try:
                piece = connection.socket.recv(1 << 16)
            except BlockingIOError:
                piece = None
            except OSError:
                piece = b""
            if piece == b"":
                self._lose(connection, RESET)
                return
            if piece and not self._take_piece(connection, piece):
                return
        if event & select.EPOLLOUT and connection.rest is not None:
            self._send_rest(connection)

    def _take_piece(self, connection: _Connection, piece: bytes) -> bool:
        """Returns whether the connection is still in use."""
        request, response = connection.request, connection.response
        try:
            if request is None:
                raise Malformed(f"a response to nothing: {piece!r}")
            if not response.add(piece):
                return True
        except Malformed:
            self._lose(connection, MALFORMED)
            return False
        self._finish(request, response.status)
        if self._keep and response.status == 200:
            self.kept.append((request, response.data))
        connection.request, connection.response = None, Response()
        if response.closes:
            self._lose(connection, RESET)
            return False
        if connection.rest is None:
            self._free.append(connection)
        return True

    def _finish(self, request: int, status: int) -> None:
        self.latency[request] = self._now() - self._due[request]
        self.status[request] = status
        self._unfinished -= 1

    def _lose(self, connection: _Connection, why: int) -> None:
        """Closes a connection and opens another one; its request, if there is one, has failed."""
        if connection.request is not None:
            self._finish(connection.request, why)
        elif connection in self._free:
            self._free.remove(connection)
        del self._by_descriptor[connection.socket.fileno()]
        connection.socket.close()
        self._connect()

    def _check(self) -> None:
        """Gives up requests, and connects again where nobody listened."""
        self._checked = now = self._now()
        while self._waiting and now - self._due[self._waiting[0]] > GIVE_UP_S:
            self._finish(self._waiting.popleft(), NOTHING)
        for connection in list(self._by_descriptor.values()):
            request = connection.request
            if request is not None and now - self._due[request] > GIVE_UP_S:
                self._lose(connection, NOTHING)
        while self._to_connect and self._to_connect[0] <= now:
            self._to_connect.popleft()
            self._connect()

    def _connect_all(self) -> None:
        for _ in range(self._count):
            connection = _Connection()
            connection.socket.settimeout(GIVE_UP_S)
            try:
                connection.socket.connect(self._address)
            except OSError as error:
                raise ConnectionError(
                    f"nothing answers at {self._address[0]}:{self._address[1]} ({error}): start "
                    "the server first"
                ) from None
            connection.socket.setblocking(False)
            connection.connected = True
            self._register(connection, _READ)
            self._free.append(connection)

    def _connect(self) -> None:
        connection = _Connection()
        result = connection.socket.connect_ex(self._address)
        if result in (0, errno.EINPROGRESS):
            self._register(connection, select.EPOLLOUT)
        else:
            connection.socket.close()
            self._to_connect.append(self._now() + _RECONNECT_S)

    def _take_connected(self, connection: _Connection) -> None:
        if connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            del self._by_descriptor[connection.socket.fileno()]
            connection.socket.close()
            self._to_connect.append(self._now() + _RECONNECT_S)
            return
        connection.connected = True
        self._epoll.modify(connection.socket, _READ)
        self._free.append(connection)

    def _register(self, connection: _Connection, events: int) -> None:
        self._by_descriptor[connection.socket.fileno()] = connection
        self._epoll.register(connection.socket, events)

"""Responses of HTTP/1.1, cut by status and Content-Length alone."""

_END = b"\r\n\r\n"


class Malformed(ValueError):
    """What came is no response with a Content-Length."""


class Response:
    """One response as it comes in, in any number of pieces.

    Attributes:
        data: what has come of it, head and body.
        status: 0 until the head is there.
        closes: whether the server closes the connection after it.
    """

    __slots__ = ("_size", "closes", "data", "status")

    def __init__(self) -> None:
        self.data = b""
        self.status, self.closes, self._size = 0, False, 0

    def add(self, piece: bytes) -> bool:
        """Takes the next bytes, and returns whether the response is complete.

        Raises:
            Malformed: the head has no status or no Content-Length, or more came than it says.
        """
        self.data = self.data + piece if self.data else piece
        if not self.status and not self._read_head():
            return False
        if len(self.data) > self._size:
            raise Malformed(f"{len(self.data) - self._size} bytes after a response")
        return len(self.data) == self._size

    def _read_head(self) -> bool:
        end = self.data.find(_END)
        if end < 0:
            return False
        head = self.data[: end + 2].lower()
        at = head.find(b"\r\ncontent-length:")
        try:
            length = int(head[at + 17 : head.index(b"\r\n", at + 17)]) if at >= 0 else -1
            status = int(head[9:12])
        except ValueError:
            length = -1
        if length < 0 or not head.startswith(b"http/1."):
            raise Malformed(f"no response with a Content-Length: {self.data[: end + 4]!r}")
        self.status, self._size = status, end + len(_END) + length
        self.closes = b"\r\nconnection: close\r\n" in head or head.startswith(b"http/1.0")
        return True

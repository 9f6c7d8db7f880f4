"""Responses that arrive in any pieces."""

import pytest

from benchmarks.serve.responses import Malformed, Response

WHOLE = b"HTTP/1.1 200 OK\r\nserver: x\r\ncontent-LENGTH: 5\r\nx-y: z\r\n\r\n\r\n\r\n!"


@pytest.mark.parametrize("cut", range(1, len(WHOLE)))
def test_a_response_in_two_pieces(cut: int) -> None:
    response = Response()
    assert not response.add(WHOLE[:cut])
    assert response.add(WHOLE[cut:])
    assert (response.status, response.data, response.closes) == (200, WHOLE, False)


def test_a_response_byte_by_byte() -> None:
    response = Response()
    complete = [response.add(bytes([byte])) for byte in WHOLE]
    assert complete == [False] * (len(WHOLE) - 1) + [True]


def test_no_body() -> None:
    response = Response()
    assert response.add(b"HTTP/1.1 503 Unavailable\r\nContent-Length: 0\r\n\r\n")
    assert response.status == 503


@pytest.mark.parametrize(
    ("head", "closes"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nCONNECTION: Close\r\n\r\n", True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive\r\n\r\n", False),
    ],
)
def test_who_closes_says_so(head: bytes, closes: bool) -> None:
    response = Response()
    assert response.add(head)
    assert response.closes == closes


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 2xx OK\r\nContent-Length: 0\r\n\r\n",
        b"SMTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        WHOLE + b"H",
    ],
)
def test_what_is_no_response(data: bytes) -> None:
    with pytest.raises(Malformed):
        Response().add(data)

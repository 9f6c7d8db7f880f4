"""Connections for HTTP: what a caller does with one harms neither its next request nor others."""

import contextlib
import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.direct.nodes import until
from tests.serve.asking import binary_of, by_json, drawn, json_of
from tests.serve.running import Running, reply_of

pytestmark = pytest.mark.full

CASE = drawn(2, 1)
PATH = "/v2/models/ranker/infer"
GOOD = json.dumps(json_of(CASE.ragged())).encode()
LIMIT = 1 << 20


def head(method: str = "POST", path: str = PATH, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: here", *lines, "", ""]).encode()


def post(body: bytes, *lines: str, path: str = PATH) -> bytes:
    return head("POST", path, f"Content-Length: {len(body)}", *lines) + body


class Connection:
    """A connection whose bytes the test chooses."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._file = connected.makefile("rb")

    def send(self, *parts: bytes) -> None:
        for each in parts:
            self.socket.sendall(each)

    def status(self) -> int:
        """Returns the status of the next reply, all of which is read."""
        return self.reply()[0]

    def reply(self, *, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
        match = re.match(rb"HTTP/1\.1 (\d+) ", self._file.readline())
        assert match
        headers = {}
        while line := self._file.readline().strip():
            name, _, value = line.decode().partition(": ")
            headers[name.lower()] = value
        size = int(headers.get("content-length", 0)) if has_body else 0
        return int(match[1]), headers, self._file.read(size)

    def is_right(self) -> bool:
        """Returns whether the next reply has the scores of the good request."""
        status, _, body = self.reply()
        click = json.loads(body)["outputs"][0]["data"]
        return status == 200 and np.allclose(click, CASE.scores()["click"], rtol=1e-5, atol=1e-6)

    def is_closed(self) -> bool:
        return self._file.read(1) == b""


@pytest.fixture
def connection(service: Running) -> Iterator[Connection]:
    with service.connect() as connected:
        yield Connection(connected)


def test_pipelined_requests_are_answered_in_order(connection: Connection):
    connection.send(post(GOOD) + post(b"{}") + post(GOOD) + head("GET", "/v2") + post(GOOD))
    assert connection.is_right()
    assert connection.status() == 400
    assert connection.is_right()
    assert connection.status() == 200
    assert connection.is_right()


@pytest.mark.parametrize(
    ("refused", "status"),
    [
        (post(bytes(LIMIT + 1)), 413),
        (post(GOOD, path="/v2/models/other/infer"), 404),
        (post(GOOD, "Content-Encoding: gzip"), 400),
        (post(GOOD, "Inference-Header-Content-Length: x"), 400),
        # Its tensors are not read, since the head says enough.
        (post(bytes(LIMIT), "Inference-Header-Content-Length: 100"), 400),
        (post(GOOD, path="/v2"), 405),
        (post(b"POST /v2 HTTP/1.1\r\n\r\n" * 9, path="/nothing"), 404),
    ],
)
def test_a_body_that_is_not_read_is_no_next_request(
    connection: Connection, refused: bytes, status: int
):
    cut = len(refused) // 2
    connection.send(refused[:cut])
    # Whether it is answered now or after the rest.
    connection.send(refused[cut:] + post(GOOD))
    assert connection.status() == status
    assert connection.is_right()


def test_a_refusal_does_not_wait_for_the_body(connection: Connection):
    refused = post(bytes(LIMIT + 1))
    connection.send(refused[:1000])
    assert connection.status() == 413
    connection.send(refused[1000:] + post(GOOD))
    assert connection.is_right()


def test_tensors_are_not_awaited_when_the_head_says_enough(connection: Connection):
    body, headers = binary_of(CASE.ragged(), parameters={"timeout": 0})
    refused = post(body, *(f"{name}: {value}" for name, value in headers.items()))
    connection.send(refused[:-1])
    assert connection.status() == 503
    connection.send(refused[-1:] + post(GOOD))
    assert connection.is_right()


def test_a_body_in_chunks(connection: Connection):
    chunked = head("POST", PATH, "Transfer-Encoding: chunked")
    cut = len(GOOD) // 3
    parts = [GOOD[:cut], GOOD[cut : 2 * cut], GOOD[2 * cut :], b""]
    connection.send(chunked, *(b"%x\r\n%b\r\n" % (len(part), part) for part in parts))
    assert connection.is_right()


def test_a_body_in_chunks_above_the_limit(connection: Connection):
    connection.send(head("POST", PATH, "Transfer-Encoding: chunked"))
    for _ in range(LIMIT // 65536 + 1):
        connection.send(b"10000\r\n" + bytes(65536) + b"\r\n")
    assert connection.status() == 413
    connection.send(b"0\r\n\r\n", post(GOOD))
    assert connection.is_right()


def test_a_caller_that_waits_to_be_told_to_continue(connection: Connection):
    connection.send(head("POST", PATH, f"Content-Length: {len(GOOD)}", "Expect: 100-continue"))
    assert connection.reply()[0] == 100
    connection.send(GOOD)
    assert connection.is_right()


def test_a_caller_that_need_not_continue(connection: Connection):
    connection.send(head("POST", PATH, f"Content-Length: {LIMIT + 1}", "Expect: 100-continue"))
    assert connection.status() == 413


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Length: 3", "Content-Length: 4"),
        ("Content-Length: 3", "Transfer-Encoding: chunked"),
        ("Content-Length: -3",),
        ("Content-Length: +3",),
        ("Content-Length: 3x",),
        ("Transfer-Encoding: chunked, identity",),
        ("Content-Length : 3",),
    ],
)
def test_bodies_whose_end_is_not_known_end_the_connection(
    connection: Connection, lines: tuple[str, ...]
):
    connection.send(head("POST", PATH, *lines) + b"{}\n")
    assert connection.status() == 400
    assert connection.is_closed()


def test_an_upgrade_is_refused_with_its_cure(connection: Connection):
    connection.send(post(GOOD, "Connection: Upgrade", "Upgrade: h2c"))
    status, _, body = connection.reply()
    assert (status, b"HTTP/1.1" in body) == (400, True)


@pytest.mark.parametrize("path", ["/", "/metrics", "/v2", "/v2/models/ranker", "/v2/health/ready"])
def test_head_has_no_body(connection: Connection, path: str):
    connection.send(head("HEAD", path) + head("GET", path))
    status, headers, _ = connection.reply(has_body=False)
    assert (status, int(headers["content-length"]) > 0) == (200, True)
    assert connection.status() == 200


@pytest.mark.parametrize(("path", "allowed"), [("/v2", "GET, HEAD"), (PATH, "POST")])
def test_wrong_methods(service: Running, path: str, allowed: str):
    for method in ("DELETE", "PUT", "PATCH", "OPTIONS"):
        status, headers, _ = service.request(method, path)
        assert (status, headers["allow"]) == (405, allowed)


@pytest.mark.parametrize("parts", ["head", "body"])
def test_slow_callers_hold_nobody_up(service: Running, parts: str):
    sent = head("POST", PATH, f"Content-Length: {len(GOOD)}")
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(service.connect()) for _ in range(50)]
        for each in slow:
            each.sendall(sent[:20] if parts == "head" else sent + GOOD[:20])
        by_json(service, CASE.ragged())
        slow[0].sendall(sent[20:] + GOOD if parts == "head" else GOOD[20:])
        assert Connection(slow[0]).is_right()


@pytest.mark.parametrize("sent", [post(GOOD)[:-1], head("POST", PATH, "Content-Length: 9")])
def test_callers_that_leave_before_their_body_has_come(service: Running, sent: bytes):
    gone = service.count("gone")
    with service.connect() as connected:
        connected.sendall(sent)
        by_json(service, CASE.ragged())  # until it is read
    until(lambda: service.count("gone") == gone + 1)


def test_bodies_arrive_by_byte(connection: Connection):
    body, headers = binary_of(CASE.ragged())
    [(name, value)] = headers.items()
    sent = post(body, f"{name}: {value}")
    connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.send(*(sent[at : at + 1] for at in range(len(sent))))
    assert connection.is_right()


def test_a_connection_of_http_1_0_is_closed(connection: Connection):
    connection.send(post(GOOD).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert connection.is_right()
    assert connection.is_closed()


def test_descriptors_are_given_back(service: Running):
    def descriptors() -> int:
        return len(list(Path(f"/proc/{service.pid}/fd").iterdir()))

    before = descriptors()
    for _ in range(20):
        with service.connect() as connected:
            connected.sendall(post(GOOD)[:30])
        http_client = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
        http_client.request("POST", PATH, GOOD)
        assert reply_of(http_client.getresponse())[0] == 200
        http_client.close()
    until(lambda: descriptors() <= before)

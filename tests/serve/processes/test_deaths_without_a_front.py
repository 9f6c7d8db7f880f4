"""Without a front workers share the ports, and a worker that dies resets what it holds."""

import http.client
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.direct.nodes import until
from tests.serve import ranker
from tests.serve.asking import by_grpc, json_of
from tests.serve.processes.asked import (
    CASE,
    all_answer,
    asked_all_the_while,
    is_lost,
    lose,
    losing_workers,
    served,
)
from tests.serve.running import HOST, Running, is_alive, running

pytestmark = pytest.mark.full

WORKERS = ["worker 1", "worker 2"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("shared")
    checkpoint = ranker.write_checkpoint(folder, 1)
    options = ["--checkpoint", str(checkpoint), "--deadline-ms", "60000", "--workers", "2"]
    with running(folder, *options) as service:
        until(lambda: all_answer(service))
        yield service


def test_the_log_says_where_it_answers(service: Running):
    where = f"http://{HOST}:{service.port}, gRPC at {service.grpc}"
    assert f"serving model 'ranker' at {where}" in service.log


def test_both_answer(service: Running):
    """Connections are given to them at random."""

    def all_have_answered() -> bool:
        served(service)
        by_grpc(service, CASE.ragged())
        return all(
            service.metric(f'torchrec_bls_requests_total{{outcome="ok",worker="{name}"}}') > 0
            for name in ("1a", "2a")
        )

    until(all_have_answered)


def test_a_worker_that_can_accept_no_connection_goes_on_with_those_it_has(service: Running):
    body = json.dumps(json_of(CASE.ragged())).encode()
    head = f"POST {service.infer_path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    worker = service.only("worker 1")
    limits = resource.prlimit(worker, resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        connections = [stack.enter_context(service.connect()) for _ in range(16)]
        for each in connections:
            ask(each)
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            time.sleep(1)  # ten beats, the first of which would say that it is full
            for each in connections:
                each.sendall(request)
                assert answer_of(each) == 200
                ask(each)
            assert "can accept no connection" not in service.log
        finally:
            resource.prlimit(worker, resource.RLIMIT_NOFILE, limits)


def test_a_worker_that_is_killed_loses_what_it_holds_at_most(service: Running):
    with asked_all_the_while(service) as asked:
        lose(service, "worker 1")
    # Three callers, of whom each asks one thing at a time.
    assert len(asked.lost) + asked.cut <= 3
    assert all(is_lost(each) for each in asked.lost)


def test_requests_of_other_workers_go_on(service: Running):
    with losing_workers(service), ExitStack() as stack:
        connections = [stack.enter_context(service.connect()) for _ in range(16)]
        for each in connections:
            ask(each)
        worker = service.only("worker 2")
        os.kill(worker, signal.SIGKILL)
        until(lambda: not is_alive(worker))
        ends = [is_closed(each) for each in connections]
        assert any(ends) and not all(ends)
        for each, has_ended in zip(connections, ends, strict=True):
            if not has_ended:
                ask(each)


def ask(connection: socket.socket) -> None:
    connection.sendall(b"GET /v2 HTTP/1.1\r\n\r\n")
    assert answer_of(connection) == 200


def answer_of(connection: socket.socket) -> int:
    """Reads an answer; returns its status."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    assert response.read()
    return response.status


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.5)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_the_page_and_metrics_are_those_of_all_workers(service: Running):
    total = service.count("ok")
    for _ in range(8):
        assert service.count("ok") == total  # whichever is asked
    page = service.request("GET", "/")[2].decode()
    assert "2 of 2" in page


def test_what_was_begun_is_answered_at_the_end(service: Running):
    """It is the last one of this module."""
    body = json.dumps(json_of(CASE.ragged())).encode()
    processes = [service.only(name) for name in ("zygote", "keeper", *WORKERS)]
    with service.connect() as begun:
        head = f"POST {service.infer_path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        begun.sendall(head.encode() + body[:-1])
        assert service.ready() and service.ready()
        # As systemd has it: all of them are told.
        for each in (service.pid, *processes):
            os.kill(each, signal.SIGTERM)
        begun.sendall(body[-1:])
        with begun.makefile("rb") as answered:
            assert answered.read().startswith(b"HTTP/1.1 200 ")
    assert service.process.wait(60) == 0, service.log
    until(lambda: not any(is_alive(each) for each in processes))

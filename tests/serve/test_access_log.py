"""A line for each request where somebody asked for it, and none elsewhere."""

import io
import json
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from torchrec_bls.serve.access_log import AccessLog
from torchrec_bls.serve.desk import Desk
from torchrec_bls.serve.observer import Observer
from torchrec_bls.serve.outcomes import Outcome, RequestError


def requests_at(desk: Desk) -> None:
    """Has a request answered, one answered late, one refused, and one fail."""
    with desk.request("http", time.monotonic()) as ticket:
        ticket.samples, ticket.queue_s = 3, 0.0015
    with desk.request("grpc", time.monotonic()) as ticket:
        ticket.samples, ticket.queue_s, ticket.deadline = 2, 0.25, time.monotonic() - 1
    with suppress(RequestError), desk.request("grpc", time.monotonic()):
        raise RequestError(Outcome.REFUSED, "it would be late")
    with suppress(ZeroDivisionError), desk.request("http", time.monotonic()):
        raise ZeroDivisionError


def desk_with(log: AccessLog | None) -> Desk:
    engine: Any = SimpleNamespace(decided=lambda is_refused: None)
    return Desk(engine, Observer(lambda: None), log, has_front=False)


def test_each_request_has_a_line() -> None:
    file = io.StringIO()
    began = time.time()
    requests_at(desk_with(AccessLog(file)))
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [line["outcome"] for line in lines] == ["ok", "late", "refused", "failed"]
    assert [line["protocol"] for line in lines] == ["http", "grpc", "grpc", "http"]
    assert [line["samples"] for line in lines] == [3, 2, 0, 0]
    assert [line["queue_ms"] for line in lines] == [1.5, 250.0, None, None]
    assert all(began - 1e-6 <= line["time"] <= time.time() for line in lines)
    assert all(0 <= line["ms"] < 60e3 for line in lines)


def test_without_a_log_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    requests_at(desk_with(None))
    assert capsys.readouterr() == ("", "")


def test_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    requests_at(desk_with(AccessLog()))
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 4

"""What becomes of a planner that the benchmark of searches runs in a process of its own."""

import json
import os
import time
from multiprocessing.connection import Connection

import pytest
from own_process import in_a_process

pytestmark = pytest.mark.full


def plans(answer: Connection, seconds: float) -> None:
    for message in ({}, {}, {"seconds": seconds}):
        answer.send_bytes(json.dumps(message).encode())


def raises(answer: Connection) -> None:
    answer.send_bytes(b"{}")
    raise ValueError("no plan")


def dies(answer: Connection) -> None:
    os._exit(3)


def takes_long(answer: Connection) -> None:
    answer.send_bytes(b"{}")
    time.sleep(60)


def test_a_result() -> None:
    assert in_a_process(plans, (1.5,), 60.0) == {"seconds": 1.5}


def test_an_error_is_told() -> None:
    assert in_a_process(raises, (), 60.0)["failure"] == "ValueError: no plan"


def test_a_process_that_dies_is_noticed() -> None:
    assert in_a_process(dies, (), 60.0)["failure"] == "died with exit code 3"


def test_a_planner_that_takes_too_long() -> None:
    result = in_a_process(takes_long, (), 0.1)
    assert result == {"seconds": 0.1, "failure": "no result in 0 s"}

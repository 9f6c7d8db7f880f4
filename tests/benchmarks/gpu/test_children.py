"""Cases that raise, crash or hang cost no other case, and processes end with the probe."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from benchmarks.gpu.children import Child, ChildError, Reports, each_case
from benchmarks.gpu.runtime import Runtime
from tests.benchmarks.gpu.fake_cuda import FakeCuda

pytestmark = pytest.mark.full

DEADLINE_S = 120.0


def soon() -> float:
    return time.monotonic() + DEADLINE_S


def behave(runtime: Runtime, how: str) -> Iterator[dict[str, Any]]:
    assert isinstance(runtime, FakeCuda)
    yield {"pid": os.getpid()}
    if how == "raises twice":
        try:
            raise ValueError("first")
        finally:
            raise OSError("second")
    if how == "raises":
        raise ValueError("no such thing")
    if how == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hangs":
        signal.pause()
    yield {"second": True}


def refuse() -> Runtime:
    raise RuntimeError("no CUDA here")


def test_cases_that_fail_are_told_and_the_others_go_on() -> None:
    kinds = ["works", "raises", "works", "crashes", "works"]
    cases = [{"how": how} for how in kinds]
    found = list(each_case(FakeCuda, behave, cases, DEADLINE_S, soon()))
    ends = [each for each in found if "pid" not in each]
    assert [each["how"] for each in ends] == kinds
    assert [each.get("second") for each in ends] == [True, None, True, None, True]
    assert ends[1]["failed"].startswith("ValueError: no such thing (test_children.py:")
    assert ends[3]["failed"] == f"the process ended with {-signal.SIGSEGV}"
    pids = [each["pid"] for each in found if "pid" in each]
    assert pids[0] == pids[1] and len(set(pids)) == 3  # a new process after a failure alone


def test_an_error_during_the_end_hides_no_other() -> None:
    found = list(each_case(FakeCuda, behave, [{"how": "raises twice"}], DEADLINE_S, soon()))
    text = found[-1]["failed"]
    assert text.startswith("OSError: second (test_children.py:")
    assert ", after ValueError: first (test_children.py:" in text


def test_a_case_that_hangs_is_killed() -> None:
    with Child(echo) as first:  # the server has started and imported
        first.send(0)
        first.receive(soon())
    cases = [{"how": "hangs"}, {"how": "works"}]
    found = list(each_case(FakeCuda, behave, cases, 2.0, soon()))
    assert [each.get("failed") for each in found] == [None, "no answer for 2 s", None, None]
    with pytest.raises(ProcessLookupError):
        os.kill(found[0]["pid"], 0)


def test_what_has_no_time_is_left_out() -> None:
    cases = [{"how": "works"}, {"how": "raises"}]
    found = list(each_case(FakeCuda, behave, cases, 1.0, time.monotonic()))
    assert found == [{**case, "failed": "left out: no time was left"} for case in cases]


def test_a_gpu_that_cannot_be_opened_fails_each_case() -> None:
    (found,) = each_case(refuse, behave, [{"how": "works"}], DEADLINE_S, soon())
    assert found["failed"].startswith("RuntimeError: no CUDA here")


def echo(reports: Reports) -> None:
    reports.send(reports.receive() + 1)


def test_messages_go_both_ways_until_the_child_ends() -> None:
    with Child(echo) as child:
        child.send(1)
        assert child.receive(soon()) == 2
        with pytest.raises(ChildError, match="the process ended with 0"):
            child.receive(soon())


def have_a_child(pids: Connection) -> None:
    for found in each_case(FakeCuda, behave, [{"how": "hangs"}], 600, soon()):
        pids.send(found["pid"])


def test_a_child_ends_with_a_parent_that_is_killed() -> None:
    context = multiprocessing.get_context("forkserver")
    pids, of_parent = context.Pipe(duplex=False)
    parent = context.Process(target=have_a_child, args=(of_parent,))
    parent.start()
    try:
        assert pids.poll(DEADLINE_S)
        child = os.pidfd_open(pids.recv())
    finally:
        parent.kill()
        parent.join()
    try:
        assert select.select([child], [], [], DEADLINE_S)[0], "the child lives on"
    finally:
        os.close(child)

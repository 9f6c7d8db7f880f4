"""Who is in a forward: a change waits for those, and for nobody who is not."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType
from typing import Any

import pytest

from tests.direct.threads import until
from torchrec_bls.direct.serving.gate import Gate
from torchrec_bls.errors import PeerTimeoutError

DEADLINE = 30.0


def forward(gate: Gate, work: Callable[[], Any], leave: bool = True) -> None:
    gate.enter(sys._getframe())
    work()
    if leave:
        gate.leave()


def change(gate: Gate, deadline: float = DEADLINE) -> list[str]:
    changes: list[str] = []
    with gate.lock:
        gate.while_closed(lambda: changes.append("changed"), deadline)
    return changes


def in_thread(work: Callable[[], Any], name: str = "other") -> threading.Thread:
    thread = threading.Thread(target=work, name=name)
    thread.start()
    return thread


def test_a_change_waits_for_the_forwards_inside_and_no_other_begins() -> None:
    gate, inside, end = Gate(), threading.Event(), threading.Event()
    order: list[str] = []

    def stay() -> None:
        inside.set()
        end.wait(DEADLINE)
        order.append("left")

    first = in_thread(lambda: forward(gate, stay))
    inside.wait(DEADLINE)
    changing = threading.Event()

    def change_it() -> None:
        with gate.lock:
            changing.set()
            gate.while_closed(lambda: order.append("changed"), DEADLINE)

    change_thread = in_thread(change_it)
    changing.wait(DEADLINE)
    until(lambda: gate._closing is not None)
    second = in_thread(lambda: forward(gate, lambda: order.append("second")))
    end.set()
    for thread in (first, change_thread, second):
        thread.join(DEADLINE)
    assert order == ["left", "changed", "second"]


def test_a_thread_that_stays_inside_is_named_and_the_gate_opens_again() -> None:
    gate, inside, end = Gate(), threading.Event(), threading.Event()

    def stay() -> None:
        inside.set()
        end.wait(DEADLINE)

    thread = in_thread(lambda: forward(gate, stay), "slow one")
    inside.wait(DEADLINE)
    with pytest.raises(PeerTimeoutError, match=r"thread 'slow one' \(\d+\) of this process stays"):
        change(gate, 0.01)
    forward(gate, lambda: None)
    end.set()
    thread.join()
    assert change(gate) == ["changed"]


def test_threads_that_ended_inside_or_were_interrupted_do_not_count() -> None:
    gate = Gate()
    in_thread(lambda: forward(gate, lambda: None, leave=False)).join()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        forward(gate, interrupt)
    assert change(gate, 0.0) == ["changed"]


def test_a_forward_within_a_forward_does_not_wait() -> None:
    gate = Gate()

    def call_again() -> None:
        frame = sys._getframe()
        assert gate.enter(frame)
        gate.leave()
        assert gate.running()

    forward(gate, call_again)
    assert not gate.running()


def test_an_interrupted_change_leaves_the_gate_open() -> None:
    gate = Gate()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), gate.lock:
        gate.while_closed(interrupt, DEADLINE)
    forward(gate, lambda: None)
    gate._closing = threading.Lock()  # between the store and what undoes it
    forward(gate, lambda: None)
    assert change(gate) == ["changed"]


def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    gate, inside, end = Gate(), threading.Event(), threading.Event()

    def stay() -> None:
        inside.set()
        end.wait(DEADLINE)

    def hold() -> None:
        with gate.lock:
            stay()

    for other in (lambda: forward(gate, stay), hold):
        inside.clear()
        thread = in_thread(other)
        inside.wait(DEADLINE)
        child = os.fork()
        if child == 0:
            signal.alarm(int(DEADLINE))
            os._exit(0 if change(gate, 0.0) == ["changed"] else 1)
        _, status = os.waitpid(child, 0)
        end.set()
        thread.join()
        end.clear()
        assert status == 0


def at_lines(call: Callable[[], Any], work: Callable[[int], Any]) -> None:
    """Calls a method, and `work` before each of its lines, as another thread could."""
    code, numbers = call.__func__.__code__, count()  # type: ignore[attr-defined]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not code:
            return None
        if event == "line":
            work(next(numbers))
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)


def lines_of(call: Callable[[], Any]) -> Iterator[int]:
    numbers: list[int] = []
    at_lines(call, numbers.append)
    assert len(numbers) > 2
    yield from numbers


def test_a_forward_that_begins_at_any_line_of_a_look_counts() -> None:
    """The one before it was interrupted, and its frame has ended."""

    def left_behind() -> Gate:
        gate = Gate()
        forward(gate, lambda: None, leave=False)
        return gate

    own = sys._getframe()
    for line in lines_of(left_behind().running):
        gate = left_behind()
        at_lines(gate.running, lambda at, g=gate, n=line: g.enter(own) if at == n else None)
        assert gate.running() == {threading.get_ident(): [own]}, line


def test_an_outer_forward_counts_at_any_line_of_the_inner_ones_end() -> None:
    gate, own = Gate(), sys._getframe()
    gate.enter(own)
    gate.enter(own)
    found: list[bool] = []
    at_lines(gate.leave, lambda _: found.append(threading.get_ident() in gate.running()))
    assert len(found) > 3 and all(found)
    gate.leave()
    assert gate.running() == {}

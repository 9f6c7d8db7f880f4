"""Ranks that fail in an all-to-all over the backend `bls`: the channel's types, and soon."""

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.processes import run, run_outcomes
from tests.tiers import slow_but
from torchrec_bls import BLSOptions, _native
from torchrec_bls.collective.backend.calls import CallQueue
from torchrec_bls.errors import ChannelClosedError, PeerDiedError, PoisonedError

# Far beyond the deadline of a run: whatever ends a wait, it is not this.
NEVER = BLSOptions(deadline=3600.0, bound=1)


def start(group: dist.ProcessGroup) -> Any:
    rows = 2 * group.size()
    return dist.all_to_all_single(torch.empty(rows), torch.ones(rows), group=group, async_op=True)


def be_killed(rank: int, in_a_future: bool) -> None:
    group = dist.new_group(backend="bls", pg_options=NEVER)
    for _ in range(3):
        start(group).wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    works = [start(group), start(group)]
    with pytest.raises((PeerDiedError, PoisonedError)) as first:
        works[0].get_future().wait() if in_a_future else works[0].wait()
    assert "rank 1 died" in str(first.value)
    # The other one says the same, and further calls do not hang.
    assert works[1].is_completed()
    assert not works[1].is_success()
    assert works[1].exception() is works[0].exception()
    with pytest.raises((PeerDiedError, PoisonedError), match="rank 1 died"):
        works[1].wait()
    with pytest.raises(PoisonedError, match="rank 1 died"):
        start(group)
    raise works[0].exception()


@pytest.mark.parametrize("in_a_future", [False, True])
def test_a_killed_rank_is_named(in_a_future: bool) -> None:
    outcomes = run_outcomes(3, be_killed, in_a_future)
    assert outcomes[1].error == "ProcessDied"
    errors = {outcomes[0].error, outcomes[2].error}
    assert errors <= {"PeerDiedError", "PoisonedError"}, outcomes
    assert "PeerDiedError" in errors


def look_for_a_killed_rank(rank: int) -> None:
    group = dist.new_group(backend="bls", pg_options=NEVER)
    start(group).wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = start(group)
    while not work.is_completed():
        time.sleep(0.01)
    work.wait()


def test_looking_at_a_handle_of_a_killed_rank_ends() -> None:
    outcomes = run_outcomes(2, look_for_a_killed_rank)
    assert outcomes[0].error == "PeerDiedError", outcomes[0]


def miss_the_deadline(rank: int, from_timeout: bool) -> None:
    group = (
        dist.new_group(backend="bls", timeout=timedelta(seconds=1))
        if from_timeout
        else dist.new_group(backend="bls", pg_options=BLSOptions(deadline=1.0))
    )
    start(group).wait()
    if rank == 0:
        try:
            start(group).wait()
        finally:
            dist.group.WORLD.get_group_store().set("timed out", "")
    dist.group.WORLD.get_group_store().wait(["timed out"])


@pytest.mark.parametrize("from_timeout", slow_but([True], [True, False]))
def test_the_deadline_is_that_of_the_options_or_of_the_group(from_timeout: bool) -> None:
    waiting, late = run_outcomes(2, miss_the_deadline, from_timeout)
    assert waiting.error == "PeerTimeoutError", waiting
    assert "did not send within 1.0" in waiting.message
    assert late.error is None


def stop_using_it(rank: int, how: str) -> None:
    group = dist.new_group(backend="bls", pg_options=NEVER)
    start(group).wait()
    if rank == 0:
        work = start(group)
        dist.destroy_process_group(group) if how == "destroyed" else group.abort()
        with pytest.raises(ChannelClosedError):
            work.wait()
    else:
        for _ in range(2):
            start(group).wait()


@pytest.mark.parametrize(("how", "error"), [("destroyed", "PeerClosed"), ("aborted", "Poisoned")])
def test_a_group_that_one_rank_gives_up(how: str, error: str) -> None:
    outcomes = run_outcomes(2, stop_using_it, how)
    assert outcomes[0].error is None, outcomes[0]
    assert outcomes[1].error == f"{error}Error", outcomes[1]


def disagree(rank: int) -> None:
    options = BLSOptions(bound=rank, deadline=20.0)
    start(dist.new_group(backend="bls", pg_options=options)).wait()


def test_ranks_of_different_bounds_are_told() -> None:
    for outcome in run_outcomes(2, disagree):
        assert outcome.error == "RendezvousError"
        assert "bound differs between ranks (ranks [0]: 0; ranks [1]: 1)" in outcome.message


def leave_it_unfinished(rank: int) -> None:
    group = dist.new_group(backend="bls", pg_options=NEVER)
    start(group).wait()
    start(group)
    start(group)


def test_ranks_that_end_with_calls_outstanding_end() -> None:
    run(2, leave_it_unfinished)


def then_interrupted(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        function(*arguments)
        signal.raise_signal(signal.SIGINT)

    return call


class InterruptedAfter:
    """A native channel, one of whose calls is interrupted once it is done."""

    def __init__(self, native: _native.Channel, call: str) -> None:
        self._native = native
        self._call = call

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._native, name)
        return then_interrupted(value) if name == self._call else value


def be_interrupted(rank: int, after: str) -> None:
    # A shell's background jobs, and what they start, ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    group: Any = dist.new_group(backend="bls", pg_options=NEVER)
    start(group).wait()
    works = [start(group)]
    if rank == 1:
        for work in works:
            work.wait()
        while True:
            start(group).wait()
    queue: CallQueue = group._queue
    if after in ("wait", "release"):
        works.append(start(group))
        struck = InterruptedAfter(queue.channel.native, after)
        with (
            mock.patch.object(queue.channel, "native", struck),
            pytest.raises(KeyboardInterrupt),
        ):
            works[0].wait()
    else:
        post = then_interrupted(_native.post_buffers)
        with mock.patch.object(_native, "post_buffers", post), pytest.raises(KeyboardInterrupt):
            start(group)
    for work in works:
        with pytest.raises(PoisonedError, match=r"rank 0 failed: .*KeyboardInterrupt"):
            work.wait()
        with pytest.raises(PoisonedError):
            work.get_future().wait()
    with pytest.raises(PoisonedError, match=r"rank 0 failed: .*KeyboardInterrupt"):
        start(group)


# After these calls it is open which message the next handle gets.
@pytest.mark.parametrize("after", ["post_buffers", "wait", "release"])
def test_an_interrupt_in_a_call_ends_the_channel(after: str) -> None:
    outcomes = run_outcomes(2, be_interrupted, after)
    assert outcomes[0].error is None, outcomes[0]
    assert outcomes[1].error == "PoisonedError", outcomes[1]
    assert "KeyboardInterrupt" in outcomes[1].message


def be_interrupted_in_a_wait(rank: int, how: str) -> None:
    store = dist.group.WORLD.get_group_store()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    group = dist.new_group(backend="bls", pg_options=NEVER)
    if how != "first call":
        start(group).wait()
    if rank == 0:
        store.wait(["struck"])
    else:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        if how == "future":
            work = start(group)
            future = work.get_future()
            time.sleep(0.1)  # by when its thread waits
            work.wait()
            future.wait()
        elif how == "functional":
            rows = [2] * group.size()
            sent = functional.all_to_all_single(torch.ones(sum(rows)), rows, rows, group)
            functional.wait_tensor(sent)
        else:
            rows = 2 * group.size()
            dist.all_to_all_single(torch.empty(rows), torch.ones(rows), group=group)
    finally:
        store.set("struck", "")
    # What was struck may have been there already.
    start(group).wait()


@pytest.mark.parametrize("how", ["first call", "blocking call", "future", "functional"])
def test_an_interrupt_ends_a_wait_and_all_ranks_are_told(how: str) -> None:
    peer, struck = run_outcomes(2, be_interrupted_in_a_wait, how)
    assert struck.error == "KeyboardInterrupt", struck
    assert peer.error == ("RendezvousError" if how == "first call" else "PoisonedError"), peer
    assert "on rank 1" in peer.message
    assert "KeyboardInterrupt" in peer.message

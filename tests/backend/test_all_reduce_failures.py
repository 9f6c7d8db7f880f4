"""All-reduces over the backend `bls` that fail while a thread does them: see tests/faults, too."""

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.processes import run, run_outcomes
from tests.tiers import slow_but
from torchrec_bls import BLSOptions
from torchrec_bls.errors import ChannelClosedError, PeerDiedError, PoisonedError

# Far beyond the deadline of a run: whatever ends a wait, it is not this.
NEVER = BLSOptions(deadline=3600.0)


def start(group: Any, size: int = 8) -> Any:
    return dist.all_reduce(torch.ones(size), group=group, async_op=True)


def be_killed(rank: int, in_a_future: bool) -> None:
    group = dist.new_group(backend="bls", pg_options=NEVER)
    start(group).wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    works = [start(group, 100_000), start(group)]
    if in_a_future:
        # What C++ can be told of an exception.
        with pytest.raises(RuntimeError, match=r"(PeerDied|Poisoned)Error: .*rank 1 died"):
            works[0].get_future().wait()
    with pytest.raises((PeerDiedError, PoisonedError), match="rank 1 died"):
        works[0].wait()
    # Those behind it end as well, and further calls do not hang.
    with pytest.raises(PoisonedError, match="rank 1 died"):
        works[1].wait()
    assert works[1].is_completed() and not works[1].is_success()
    for more in (lambda: start(group).wait(), lambda: dist.all_reduce(torch.ones(1), group=group)):
        with pytest.raises(PoisonedError, match="rank 1 died"):
            more()
    raise works[0].exception()


@pytest.mark.parametrize("in_a_future", slow_but([False], [False, True]))
def test_a_killed_rank_is_named(in_a_future: bool) -> None:
    outcomes = run_outcomes(3, be_killed, in_a_future)
    errors = {outcomes[0].error, outcomes[2].error}
    assert errors <= {"PeerDiedError", "PoisonedError"}, outcomes
    assert "PeerDiedError" in errors


def be_killed_in_a_backward(rank: int) -> None:
    group = dist.new_group(backend="bls", pg_options=NEVER)
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    model(torch.ones(2, 4)).sum().backward()
    loss = model(torch.ones(2, 4)).sum()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()


def test_a_backward_that_waits_for_a_killed_rank_ends() -> None:
    outcomes = run_outcomes(2, be_killed_in_a_backward)
    assert outcomes[0].error is not None and "rank 1 died" in outcomes[0].message, outcomes[0]


def give_up(rank: int, how: str) -> None:
    group = dist.new_group(backend="bls", pg_options=NEVER)
    start(group).wait()
    if rank == 0:
        work = start(group)
        dist.destroy_process_group(group) if how == "destroyed" else group.abort()
        with pytest.raises((ChannelClosedError, PoisonedError)):
            work.wait()
        with pytest.raises(ChannelClosedError):
            group.allreduce([torch.ones(8)]).wait()
    else:
        time.sleep(0.3)
        for _ in range(2):
            start(group).wait()


@pytest.mark.parametrize(
    ("how", "errors"),
    [("destroyed", {"PeerClosedError", "PoisonedError"}), ("aborted", {"PoisonedError"})],
)
def test_a_group_that_one_rank_gives_up(how: str, errors: set[str]) -> None:
    outcomes = run_outcomes(2, give_up, how)
    assert outcomes[0].error is None, outcomes[0]
    assert outcomes[1].error in errors, outcomes[1]


def be_interrupted(rank: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = dist.group.WORLD.get_group_store()
    group = dist.new_group(backend="bls", pg_options=NEVER)
    start(group).wait()
    if rank == 0:
        store.wait(["struck"])
        start(group).wait()
    work = start(group)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        work.wait()
    finally:
        store.set("struck", "")


def test_an_interrupt_of_a_wait_tells_all_ranks() -> None:
    peer, struck = run_outcomes(2, be_interrupted)
    assert struck.error == "KeyboardInterrupt", struck
    assert peer.error == "PoisonedError" and "KeyboardInterrupt" in peer.message, peer


def fork(rank: int) -> None:
    group = dist.new_group(backend="bls", pg_options=NEVER)
    start(group).wait()
    child = os.fork()
    if child == 0:
        try:
            start(group)
        except ChannelClosedError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    start(group).wait()


def test_a_forked_child_is_refused() -> None:
    run(2, fork)


def leave_unfinished(rank: int) -> None:
    group = dist.new_group(backend="bls", pg_options=NEVER)
    start(group).wait()
    if rank == 0:
        start(group)


def test_ranks_that_end_with_calls_under_way_end() -> None:
    run(2, leave_unfinished)


def disagree(rank: int) -> None:
    options = BLSOptions(deadline=20.0, transport="shm" if rank else "auto")
    start(dist.new_group(backend="bls", pg_options=options))


def test_ranks_of_different_transports_are_told() -> None:
    for outcome in run_outcomes(2, disagree):
        assert outcome.error == "RendezvousError"
        assert "transport differs between ranks (ranks [0]: auto; ranks [1]: shm)" in (
            outcome.message
        )


def count_threads(rank: int) -> None:
    before = threading.active_count()
    for _ in range(3):
        group = dist.new_group(backend="bls", pg_options=NEVER)
        dist.all_reduce(torch.ones(1), group=group)
        assert threading.active_count() == before  # a call that waits needs none
        start(group).wait()
        assert threading.active_count() == before + 1
        dist.destroy_process_group(group)
        while threading.active_count() > before:
            time.sleep(0.01)


def test_the_thread_ends_with_its_group() -> None:
    run(2, count_threads)

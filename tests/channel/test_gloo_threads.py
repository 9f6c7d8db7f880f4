"""gloo's threads of a channel do not preempt others; those of the caller's group are left alone."""

import os
import threading

import pytest
import torch
import torch.distributed as dist

from tests.processes import run
from torchrec_bls import BoundedLagChannel
from torchrec_bls.collective.transport.gloo_threads import loop_threads, stop_preempting


def policies_with_a_channel(rank: int) -> tuple[list[int], list[int], int]:
    """Returns the policies of gloo's threads from before, and of those that a channel adds, and
    what arrives."""
    dist.barrier()
    before = loop_threads()
    with BoundedLagChannel(dist.group.WORLD, slot_bytes=1024) as channel:
        channel.post([[torch.tensor([7], dtype=torch.uint8)]] * dist.get_world_size())
        with channel.wait() as arrival:
            arrived = int(arrival.tensor(1 - rank)[0])
        old, new = (
            [os.sched_getscheduler(thread) for thread in threads]
            for threads in (before, loop_threads() - before)
        )
        dist.barrier()
    return old, new, arrived


@pytest.mark.parametrize("transport", ["c10d"], indirect=True)
@pytest.mark.usefixtures("transport")
def test_threads_of_a_channel_and_of_the_callers_group() -> None:
    for old, new, arrived in run(2, policies_with_a_channel):
        assert old and set(old) == {os.sched_getscheduler(0)}
        assert new and set(new) == {os.SCHED_BATCH}
        assert arrived == 7


def test_threads_that_have_ended_or_chose_a_policy_are_left_alone() -> None:
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    assert ended.native_id is not None
    found: list[int] = []

    def idle() -> None:
        own = threading.get_native_id()
        os.sched_setscheduler(own, os.SCHED_IDLE, os.sched_param(0))
        stop_preempting({own, ended.native_id or own})
        found.append(os.sched_getscheduler(own))

    thread = threading.Thread(target=idle)
    thread.start()
    thread.join()
    assert found == [os.SCHED_IDLE]
    assert not loop_threads() & {threading.get_native_id()}

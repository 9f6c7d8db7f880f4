"""The threads of transport c10d end with their channel."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.processes import run
from torchrec_bls import BoundedLagChannel
from torchrec_bls.collective.transport.sockets import tcp_sockets


def left_after_closing(rank: int, iterations: int) -> tuple[set[str], int]:
    dist.barrier()
    before = len(tcp_sockets())
    with BoundedLagChannel(
        dist.group.WORLD, bound=1, slot_bytes=256, deadline=60, transport="c10d"
    ) as channel:
        for _ in range(iterations):
            channel.post([[torch.ones(1)]] * channel.world_size)
            channel.wait().release()
    del channel
    end = time.monotonic() + 60
    while (names := c10d_threads()) and time.monotonic() < end:
        time.sleep(0.01)
    while len(tcp_sockets()) > before and time.monotonic() < end:
        time.sleep(0.01)
    dist.barrier()
    return names, len(tcp_sockets()) - before


def c10d_threads() -> set[str]:
    return {each.name for each in threading.enumerate() if "torchrec_bls c10d" in each.name}


@pytest.mark.parametrize("iterations", [0, 5])
def test_threads_and_connections_end_when_all_ranks_have_closed(iterations: int) -> None:
    # Receives of messages that nobody sends any more are under way then.
    assert run(3, left_after_closing, iterations) == [(set(), 0)] * 3

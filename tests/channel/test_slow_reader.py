"""A rank that reads nothing over TCP for a while: its peer posts on to the end of its credits."""

import ctypes
import gc
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.processes import run
from torchrec_bls import BoundedLagChannel

BOUND = 1
SLOTS = 2 * (BOUND + 1)  # messages that a peer may post to a rank that has read none
NUMBERS = 1 << 20  # int64, of a message: the kernel keeps a part of it for who does not read
MESSAGE_BYTES = 8 * NUMBERS
ROUNDS = 4


def large(sequence: int) -> torch.Tensor:
    return torch.arange(sequence * NUMBERS, (sequence + 1) * NUMBERS)


def private_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # tensors that were sent, or compared with what came
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


def read_or_be_read_late(rank: int) -> list[int]:
    """Returns by how many bytes the rank has grown while all of a round's messages are unread.

    Rank 1 posts as many as its bound allows, and then makes no call until its peer has posted all
    that it may: so a post that waited for the reader would wait for ever. In the first round nobody
    has sent it a large message before, and it leaves all of them to the kernel. Later they come in
    the background."""
    warnings.simplefilter("ignore")  # messages above a slot are intended
    store = dist.group.WORLD.get_group_store()
    with BoundedLagChannel(dist.group.WORLD, bound=BOUND, slot_bytes=4096, deadline=50) as channel:
        before, grown = private_bytes(), []
        for number in range(ROUNDS):
            first = number * SLOTS
            sequences = range(first, first + SLOTS)
            if rank == 0:
                for sequence in sequences:
                    if sequence > first + BOUND:
                        take_small(channel)
                    channel.post([[], [large(sequence)]])
                store.set(f"posted {number}", "")
                grown.append(private_bytes() - before)
                for _ in range(BOUND + 1):
                    take_small(channel)
            else:
                for sequence in sequences[: BOUND + 1]:
                    channel.post([[torch.tensor([sequence])], []])
                store.wait([f"posted {number}"])
                time.sleep(1.0)
                grown.append(private_bytes() - before)
                for sequence in sequences:
                    with channel.wait() as arrival:
                        assert torch.equal(arrival.tensor(0, 0, torch.int64), large(sequence))
                    if sequence + BOUND + 1 in sequences:
                        channel.post([[torch.tensor([sequence + BOUND + 1])], []])
        return grown


def take_small(channel: BoundedLagChannel) -> None:
    with channel.wait() as arrival:
        assert arrival.tensor(1, 0, torch.int64).tolist() == [arrival.sequence]


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
@pytest.mark.usefixtures("transport")
def test_a_slow_reader_costs_nothing_but_the_memory_of_its_slots() -> None:
    for grown in run(2, read_or_be_read_late):
        assert len(grown) == ROUNDS
        assert max(grown) < (SLOTS + 1) * MESSAGE_BYTES, grown


def compute_for_longer_than_the_deadline(rank: int) -> None:
    """Nobody waits meanwhile, and the deadline is of waits."""
    warnings.simplefilter("ignore")  # messages above a slot are intended
    deadline = 2.0
    with BoundedLagChannel(
        dist.group.WORLD, bound=BOUND, slot_bytes=4096, deadline=deadline
    ) as channel:
        for sequence in range(BOUND + 1):
            channel.post([[large(sequence)]] * 2)
        time.sleep(2 * deadline)
        for sequence in range(BOUND + 1):
            with channel.wait() as arrival:
                assert torch.equal(arrival.tensor(1 - rank, 0, torch.int64), large(sequence))


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
@pytest.mark.usefixtures("transport")
def test_ranks_may_leave_messages_unread_for_longer_than_the_deadline() -> None:
    run(2, compute_for_longer_than_the_deadline)

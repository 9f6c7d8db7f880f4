"""Channels over TCP keep nothing of the messages that have been read, however many these were."""

import gc
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import BoundedLagChannel

BOUND = 1
SLOTS = 2 * (BOUND + 1)
SLOT_BYTES = 4096
LARGEST = 512 << 10  # bytes: these also come in the background, and smaller ones do not
BYTES = torch.randint(
    256, (2 * LARGEST,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
# By how much a rank may grow. Above the noise of the allocator, below what one large message takes
# for each of a hundred.
ALLOWED = {"private_kib": 2048, "descriptors": 0, "threads": 0}


def message(source: int, sequence: int) -> torch.Tensor:
    """Returns other bytes, of another size, for each message. The first ones are the largest, so
    that each slot has all of its memory from then on."""
    start = (sequence * 7919 + source) % LARGEST
    size = SLOT_BYTES + start * 31 % (LARGEST - SLOT_BYTES)
    return BYTES[start:][: LARGEST if sequence < SLOTS else size]


def resources() -> dict[str, int]:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "private_kib": int(status["RssAnon"].split()[0]),
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "threads": int(status["Threads"]),
    }


def exchange(rank: int, messages: int) -> dict[str, int]:
    """Returns by how much this rank has grown after a tenth of the messages."""
    warnings.simplefilter("ignore")  # messages above a slot are intended
    with BoundedLagChannel(
        dist.group.WORLD, bound=BOUND, slot_bytes=SLOT_BYTES, deadline=50
    ) as channel:
        for step in range(messages + BOUND):
            if step == messages // 10:
                before = resources()
            if step < messages:
                channel.post([[message(rank, step)]] * 2)
            if step >= BOUND:
                with channel.wait() as arrival:
                    expected = message(1 - rank, arrival.sequence)
                    assert torch.equal(arrival.tensor(1 - rank), expected)
        after = resources()
        assert channel.stats().pulled_messages == messages
    return {name: after[name] - before[name] for name in ALLOWED}


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("messages", slow_but([300], [300, 10_000]))
def test_large_messages_leave_nothing_behind(messages: int) -> None:
    for grown in run(2, exchange, messages, deadline=60.0 if messages == 300 else 300.0):
        assert all(grown[name] <= allowed for name, allowed in ALLOWED.items()), grown

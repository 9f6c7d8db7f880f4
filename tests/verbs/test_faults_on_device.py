"""The rows of the fault matrix that do not concern shared memory, over RDMA."""

import os
from dataclasses import replace

import pytest
import torch.distributed as dist

from tests.faults.faults import Stop
from tests.faults.judge import examine
from tests.faults.matrix import DEATH, DELAY, INTERRUPTS, LATER, LEAVING
from tests.faults.row import Row

DEVICE = os.environ.get("TORCHREC_BLS_TEST_DEVICE", "")

pytestmark = pytest.mark.skipif(
    not DEVICE, reason="needs an RDMA device, TORCHREC_BLS_TEST_DEVICE=...: make test-verbs"
)


def over_verbs(row: Row) -> Row:
    """Returns the row with times for a guest under software emulation, where nothing is noticed at
    once, but all by the deadline."""
    return replace(
        row,
        deadline=max(row.deadline, 30.0),
        within=None,
        arguments=(*row.arguments, ("transport", "verbs")),
    )


def death(row: Row) -> Row:
    """Returns the row for a device, to which a dead peer is one that does not answer."""
    lost = ("rank 1 is lost", "it does not answer", "Look at that rank's own output")
    return over_verbs(replace(row, words=lost))


def delay(row: Row) -> Row:
    """Returns the row with a pause and a deadline that a slow rank doesn't get to by itself."""
    words = tuple(text.replace("2.0", "8.0") for text in row.words)
    told = tuple(text.replace("2.0", "8.0") for text in row.words_of_struck)
    slower = replace(row, fault=Stop(seconds=16.0), words=words, words_of_struck=told)
    return replace(over_verbs(slower), deadline=8.0)


# Each moment with another number of ranks: a row takes seconds in the guest.
WORLDS = {"SIGKILL before post": 2, "SIGKILL between post": 4, "SIGKILL while peers sleep": 8}


def one_world_each(row: Row) -> bool:
    return all(row.world == world for name, world in WORLDS.items() if row.name.startswith(name))


ROWS = [
    *(death(row) for row in DEATH if one_world_each(row)),
    *(delay(row) for row in DELAY if row.errors),
    # A fresh interpreter takes minutes to import torch in the guest.
    *(over_verbs(row) for row in LEAVING if not row.fresh_interpreters),
    *(over_verbs(row) for row in INTERRUPTS),
    *(over_verbs(row) for row in LATER if row.name == "fork after creation"),
]


def host_of_this_rank() -> str:
    """Stands for `rendezvous.host_identity`: two ranks on each host."""
    return f"host {dist.get_rank() // 2}"


# By shared memory or RDMA, rank 1 is told in other words.
ROWS_OF_TWO_HOSTS = [
    replace(over_verbs(row), world=4, words=("rank 1 ",), arguments=(("transport", "auto"),))
    for row in (DEATH[0], LEAVING[0], LEAVING[2], *INTERRUPTS)
]


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_fault(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHREC_BLS_IB_DEVICE", DEVICE)
    verdict = examine(row)
    assert not verdict.problems, "\n".join(verdict.problems)


@pytest.mark.parametrize(
    "row", ROWS_OF_TWO_HOSTS, ids=lambda row: row.name.removesuffix(", 2 ranks")
)
def test_fault_with_shared_memory_and_verbs(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrec_bls.collective.channel.host_identity", host_of_this_rank)
    test_fault(row, monkeypatch)


def test_the_deadline_counts_where_a_dead_peer_is_retried_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 4.3 s, seven times.
    monkeypatch.setenv("TORCHREC_BLS_IB_TIMEOUT", "20")
    row = over_verbs(
        replace(
            DEATH[0],
            world=3,
            errors=("PeerTimeoutError",),
            words=("rank 1 did not send within 5.0",),
        )
    )
    test_fault(replace(row, deadline=5.0), monkeypatch)

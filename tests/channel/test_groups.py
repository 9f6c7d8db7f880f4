"""Ranks that come late to a channel or to a group of backend `bls`, and names of ranks in groups
of other ranks."""

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.processes import run, run_outcomes
from torchrec_bls import BLSOptions, BoundedLagChannel
from torchrec_bls.collective.transport.meeting import Meeting
from torchrec_bls.collective.transport.rank_names import RankNames
from torchrec_bls.distributed.inputs.refused_batches import refused
from torchrec_bls.errors import BLSError, RendezvousError

NEVER = 3600.0
MEMBERS = [1, 3]


@pytest.fixture(scope="module")
def transport() -> None:
    """In the place of the one for the other files: what ranks tell each other is the same."""


def come_late(rank: int, late: int, others: list[int], attempt: Callable[[float], Any]) -> str:
    """Lets all ranks but one give up, then all of them come. Returns what was raised."""
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    message = ""
    if rank == late:
        store.wait([f"{other} gave up" for other in others])
    else:
        for _ in range(3):
            with pytest.raises(RendezvousError) as caught:
                attempt(0.2)
        message = str(caught.value)
        store.set(f"{rank} gave up", "")
    attempt(60.0)
    return message


def make_channel(rank: int) -> str:
    group = dist.new_group(MEMBERS)
    if rank not in MEMBERS:
        return ""

    def attempt(deadline: float) -> None:
        with BoundedLagChannel(group, slot_bytes=256, name="c", deadline=deadline) as channel:
            channel.post([[torch.tensor([rank])]] * 2)
            with channel.wait() as arrival:
                assert [int(arrival.tensor(r, 0, torch.int64)) for r in (0, 1)] == MEMBERS

    return come_late(rank, 3, [1], attempt)


def test_a_late_rank_of_a_channel() -> None:
    message = run(4, make_channel)[1]
    assert "channel 'c' on rank 1 (0 of its group): ranks [3] ([1] of their group) did" in message
    assert "within 0.2 s, which the channel's argument deadline sets" in message


def call_a_group(rank: int, operation: str) -> str:
    group: Any = dist.new_group(MEMBERS, backend="bls", pg_options=BLSOptions())
    if rank not in MEMBERS:
        return ""

    def attempt(deadline: float) -> None:
        group._deadline = deadline
        numbers = torch.tensor([float(rank), float(rank)])
        if operation == "all_reduce":
            dist.all_reduce(numbers, group=group)
            assert numbers.tolist() == [4.0, 4.0]
        else:
            out = torch.empty(2)
            dist.all_to_all_single(out, numbers, group=group)
            assert out.tolist() == MEMBERS

    return come_late(rank, 3, [1], attempt)


@pytest.mark.parametrize("operation", ["all_reduce", "all_to_all"])
def test_a_late_first_call_of_a_group(operation: str) -> None:
    message = run(4, call_a_group, operation)[1]
    assert "on rank 1 (0 of its group): ranks [3] ([1] of their group) did not come" in message
    assert "BLSOptions(deadline=...) or TORCHREC_BLS_BACKEND" in message


def lose_a_rank(rank: int, how: str) -> str:
    group: Any = dist.new_group(
        MEMBERS, backend="bls", pg_options=BLSOptions(deadline=NEVER if how != "late" else 0.2)
    )
    if rank not in MEMBERS:
        return ""
    rows = torch.ones(2)
    dist.all_to_all_single(torch.empty(2), rows, group=group)
    if rank == 3:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "late":
            dist.group.WORLD.get_group_store().wait(["told"])  # type: ignore[union-attr]
            return ""
        output, rows = torch.empty(6), torch.ones(6)
    else:
        output, rows = torch.empty(4), torch.ones(4)
    with pytest.raises(BLSError) as caught:
        dist.all_to_all_single(output, rows, group=group)
    dist.group.WORLD.get_group_store().set("told", "")  # type: ignore[union-attr]
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("killed", r"rank 3 \(1 of its group\) died while"),
        ("late", r"rank 3 \(1 of its group\) did not send within"),
        ("other sizes", r"rank (1 \(0|3 \(1) of its group\) sent \d+ bytes"),
    ],
)
def test_a_rank_of_a_group_has_its_global_number(how: str, text: str) -> None:
    outcome = run_outcomes(4, lose_a_rank, how)[1]
    assert outcome.error is None, outcome
    assert "on rank 1 (0 of its group), sequence 1" in outcome.value or how == "other sizes"
    assert re.search(text, outcome.value)
    if how == "late":
        assert "raise BLSOptions(deadline=...) or TORCHREC_BLS_BACKEND" in outcome.value


def disagree(rank: int) -> str:
    group = dist.new_group(MEMBERS)
    if rank not in MEMBERS:
        return ""
    with pytest.raises(RendezvousError) as caught:
        BoundedLagChannel(group, slot_bytes=256 * rank)
    return str(caught.value)


def test_terms_that_differ_are_told_with_global_numbers() -> None:
    for message in run(4, disagree)[1::2]:
        assert "ranks [1] ([0] of their group): 256; ranks [3] ([1] of their group): 768" in message


def want_too_much(rank: int) -> str:
    group = dist.new_group(MEMBERS)
    if rank not in MEMBERS:
        return ""
    with pytest.raises(RendezvousError) as caught:
        BoundedLagChannel(group, slot_bytes=1 << 40)
    return str(caught.value)


def test_a_transport_names_ranks_by_their_global_numbers() -> None:
    for rank, message in zip(MEMBERS, run(4, want_too_much)[1::2], strict=True):
        number = MEMBERS.index(rank)
        assert f"bytes on rank {rank} ({number} of its group)" in message


def refuse(rank: int) -> str:
    group = dist.new_group(MEMBERS)
    return str(refused(group, "ids", {1: "no such id"})) if rank in MEMBERS else ""


def test_a_refused_batch_is_told_with_global_numbers() -> None:
    _, told, _, own = run(4, refuse)
    assert "ids on rank 1 (0 of its group): rank 3 (1 of its group) refused its batch" in told
    assert own == "no such id"


def announce_another_size(rank: int) -> str:
    group: Any = dist.new_group(MEMBERS)
    if rank not in MEMBERS:
        return ""
    size = 4 if rank == 3 else 2
    meeting = Meeting(
        group.get_group_store(), "m", group.rank(), size, f"try {rank}", "", RankNames(MEMBERS)
    )
    meeting.come("terms", "{}")
    dist.barrier(group)
    with pytest.raises(RendezvousError) as caught:
        meeting.look()
    return str(caught.value)


def test_ranks_of_other_groups_are_told_with_global_numbers() -> None:
    message = run(4, announce_another_size)[1]
    assert "ranks [3] ([1] of their group): 4; ranks [1] ([0] of their group): 2" in message

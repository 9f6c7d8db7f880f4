"""What the ranks of transport c10d tell each other besides messages."""

import os
import signal
import struct
import time
from pathlib import Path

import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from tests.processes import run, run_outcomes
from torchrec_bls import BoundedLagChannel, _native
from torchrec_bls.collective.transport import two_sided

# Far beyond the deadline of a run: whatever ends a wait, it is not this.
NEVER = 3600.0
LONGEST = 2**63 - 1


def channel(bound: int = 0, deadline: float = NEVER) -> BoundedLagChannel:
    return BoundedLagChannel(
        dist.group.WORLD,
        bound=bound,
        slot_bytes=256,
        name="ids",
        deadline=deadline,
        transport="c10d",
    )


def value_to_all(value: int, items: int = 1) -> list[list[torch.Tensor]]:
    return [[torch.full((items,), value)]] * dist.get_world_size()


def note(about: int, number: int, size: int = 0, text: bytes = b"") -> bytes:
    return struct.pack("<qqq1000s", about, number, size, text)


numbers = st.integers(-(2**63), LONGEST)
notes = st.builds(
    note,
    st.integers(-1, 9) | numbers,
    st.integers(-1, 10) | numbers,
    st.integers(-1, 1001) | numbers,
    st.binary(max_size=1000),
)


@given(notes | st.binary(min_size=1024, max_size=1024))
@example(note(4, 3, 1000, b"\xff" * 1000))
@example(note(4, 4))
@example(note(2, -1))
@example(note(2, 8))
@example(note(0, LONGEST))
@example(note(7, 0))
@example(note(8, LONGEST))
def test_a_note_is_refused_or_fits_the_inbox(sent: bytes) -> None:
    slots = torch.zeros(4, 4, 256, dtype=torch.uint8)
    inbox = _native.TwoSidedInbox(0, 4, 4, 256, slots)
    try:
        about, number, text = two_sided.parse_note(sent, world_size=4, posted=7)
    except ValueError as error:
        assert "Two versions of torchrec-bls" in str(error)
        return
    assert 0 <= number <= {2: 7, 4: 3}.get(about, LONGEST)
    {
        0: lambda: inbox.posted(1, number),
        1: lambda: None,
        2: lambda: inbox.read(1, number),
        3: lambda: inbox.closed(1, number),
        4: lambda: inbox.poison(number, text),
        5: lambda: None,
        6: lambda: None,
        7: lambda: None,
        8: lambda: inbox.ended(1, number),
    }[about]()


def send_a_note(rank: int, about: int, number: int) -> None:
    ids = channel()
    ids.post(value_to_all(rank))
    ids.wait().release()
    if rank == 1:
        (messenger,) = two_sided._messengers
        messenger._tell(0, about, number)
        dist.group.WORLD.get_group_store().wait(["noticed"])
        return
    ids.post(value_to_all(rank))
    try:
        ids.wait()
    finally:
        dist.group.WORLD.get_group_store().set("noticed", "")


def test_a_note_that_cannot_be_right_ends_the_wait_for_its_sender() -> None:
    for about, number in [(2, -1), (4, 77), (9, 0)]:
        waiting, _ = run_outcomes(2, send_a_note, about, number)
        assert waiting.error == "TransportError", waiting
        for words in (
            "channel 'ids' on rank 0, sequence 1, lag 0: rank 1 is lost",
            f"kind {about}, number {number}",
            "Two versions of torchrec-bls",
        ):
            assert words in waiting.message


STOPPED_BOUND = 40  # iterations, each of which a note says to be read


def release_while_the_peer_is_stopped(rank: int) -> None:
    store = dist.group.WORLD.get_group_store()
    ids = channel(STOPPED_BOUND)
    store.set(f"pid of {rank}", str(os.getpid()))
    # Larger than a slot: their memory is kept until a note says that they are read.
    for _ in range(STOPPED_BOUND + 1):
        ids.post(value_to_all(rank, items=100))
    arrivals = [ids.wait() for _ in range(STOPPED_BOUND + 1)]
    store.set(f"all is here at {rank}", "")
    store.wait([f"all is here at {1 - rank}"])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        store.wait(["released"])
    else:
        pid = int(store.get("pid of 1"))
        try:
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.01)
            for arrival in arrivals:
                arrival.release()
        finally:
            os.kill(pid, signal.SIGCONT)
        store.set("released", "")


def test_no_call_waits_for_a_stopped_peer_to_take_notes() -> None:
    run(2, release_while_the_peer_is_stopped)

"""Ranks that die, close, fail or do not come: everybody is told who and why, and soon."""

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.processes import run, run_outcomes
from tests.tiers import network_is_slow
from torchrec_bls import BoundedLagChannel
from torchrec_bls.errors import BLSError, PeerTimeoutError, PoisonedError

# Far beyond the deadline of a run: whatever ends a wait, it is not this.
NEVER = 3600.0


def channel(bound: int = 0, slot_bytes: int = 256, deadline: float = NEVER) -> BoundedLagChannel:
    return BoundedLagChannel(
        dist.group.WORLD, bound=bound, slot_bytes=slot_bytes, name="ids", deadline=deadline
    )


def value_to_all(value: int, items: int = 1) -> list[list[torch.Tensor]]:
    return [[torch.full((items,), value)]] * dist.get_world_size()


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_until_dead(pid: int) -> None:
    """Returns when the process is gone, its parent having noticed or not."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([handle], [], [])
    os.close(handle)


def read_what_a_killed_rank_sent(rank: int, items: int) -> None:
    store = dist.group.WORLD.get_group_store()
    ids = channel(bound=1)
    if rank == 1:
        ids.post(value_to_all(7, items))
        store.set("pid", str(os.getpid()))
        kill_this_process()
    pid = int(store.get("pid"))
    wait_until_dead(pid)
    ids.post(value_to_all(0))
    with ids.wait() as arrival:
        assert arrival.tensor(1, 0, torch.int64).tolist() == [7] * items
    ids.post(value_to_all(0))
    ids.wait()


def test_what_a_killed_rank_sent_before_can_still_be_read() -> None:
    reader, killed = run_outcomes(2, read_what_a_killed_rank_sent, 3)
    assert killed.error == "ProcessDied"
    assert reader.error == "PeerDiedError", reader
    assert "sequence 1, lag 0: rank 1 died" in reader.message, reader


def stay_poisoned(rank: int, reason: str) -> list[str]:
    ids = channel()
    if rank == 0:
        ids.poison(reason)
    dist.barrier()
    errors = []
    for _ in range(2):
        try:
            ids.post(value_to_all(rank))
        except PoisonedError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("the disk is full", "the disk is full"),
        ("no file '\udc80'", "no file '?'"),
        # What fits is cut within a character at one of them.
        ("ü" * 600, "ü" * 450),
        ("." + "ü" * 600, "." + "ü" * 450),
    ],
    ids=["short", "not UTF-8", "long", "long by one more"],
)
@network_is_slow
@pytest.mark.usefixtures("transport")
def test_a_poisoned_channel_stays_poisoned(reason: str, text: str) -> None:
    for errors in run(2, stay_poisoned, reason):
        assert len(errors) == 2
        assert all("rank 0 failed" in e and text in e for e in errors)


def miss_the_deadline(rank: int) -> None:
    ids = channel(deadline=1)
    if rank in (1, 3):
        dist.group.WORLD.get_group_store().wait(["timed out"])
        return
    ids.post(value_to_all(rank))
    try:
        ids.wait()
    except BLSError as error:
        assert isinstance(error, PoisonedError) or (
            isinstance(error, PeerTimeoutError) and isinstance(error, TimeoutError)
        )
        raise
    finally:
        dist.group.WORLD.get_group_store().set("timed out", "")


@network_is_slow
@pytest.mark.usefixtures("transport")
def test_the_deadline_names_every_missing_rank() -> None:
    outcomes = run_outcomes(4, miss_the_deadline)
    waiting = [outcomes[0], outcomes[2]]
    assert {outcome.error for outcome in waiting} <= {"PeerTimeoutError", "PoisonedError"}
    assert any(outcome.error == "PeerTimeoutError" for outcome in waiting)
    for outcome in waiting:
        assert "did not send within 1.0" in outcome.message
        assert "Missing: rank 1, rank 3" in outcome.message


def close_with_large_messages_unread(rank: int, read_on: int) -> None:
    ids = channel()
    ids.post(value_to_all(rank, items=1000))
    if rank == read_on:
        time.sleep(0.2)
        with ids.wait() as arrival:
            assert arrival.tensor(1 - rank, 0, torch.int64).tolist() == [1 - rank] * 1000
    ids.close()


@pytest.mark.parametrize("read_on", [0, 1, 2], ids=["rank 0 reads", "rank 1 reads", "none reads"])
def test_closing_with_large_messages_does_not_hang(read_on: int) -> None:
    run(2, close_with_large_messages_unread, read_on)


def drop_with_large_messages_unreleased(rank: int) -> None:
    ids = channel()
    ids.post(value_to_all(rank, items=1000))
    ids.wait()


def test_a_channel_that_is_dropped_does_not_hang() -> None:
    run(2, drop_with_large_messages_unreleased)


MEMORY_FILE = "/memfd:torchrec_bls (deleted)"


def hold_memory_and_die(rank: int, folder: Path) -> None:
    ids = channel(bound=1)
    ids.post(value_to_all(rank, items=1000))
    ids.wait()
    fields = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = {field[4] for field in fields if field[5:] == [MEMORY_FILE]}
    assert len(mapped) >= 4, "two rings, memory of its own message and of the peer's"
    handles = [handle for handle in Path("/proc/self/fd").iterdir() if handle.is_symlink()]
    open_files = [handle for handle in handles if str(handle.readlink()) == MEMORY_FILE]
    assert len(open_files) == 1, "that of its own message, which the peer may still open"
    assert all(handle.stat().st_mode & 0o777 == 0o600 for handle in open_files)
    (folder / str(rank)).write_text("\n".join(mapped))
    dist.barrier()
    kill_this_process()


def mapped_by_any_process() -> Iterator[str]:
    """Inodes of all memory of channels that is mapped."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has just ended
            fields = [line.split(maxsplit=5) for line in maps.read_text().splitlines()]
            yield from (field[4] for field in fields if field[5:] == [MEMORY_FILE])


@pytest.mark.parametrize("transport", ["shm"], indirect=True)
def test_no_memory_is_left_after_all_ranks_are_killed(tmp_path: Path) -> None:
    outcomes = run_outcomes(2, hold_memory_and_die, tmp_path)
    assert [outcome.error for outcome in outcomes] == ["ProcessDied"] * 2, outcomes
    used = {inode for rank in range(2) for inode in (tmp_path / str(rank)).read_text().split()}
    assert used
    assert not used & {*mapped_by_any_process()}

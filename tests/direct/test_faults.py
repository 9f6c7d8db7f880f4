"""Owners that die or stop, publishers that crash, and memory that is missing."""

import os
import signal
import threading
from typing import Any

import pytest
import torch.distributed as dist

from tests.direct import served
from tests.direct.nodes import state_of, until
from tests.direct.served import Expected, batches_of, check, weights_of
from tests.processes import run, run_outcomes
from torchrec_bls import _native, bounded_lag_modules, publish
from torchrec_bls.direct.file_holders import holders_of
from torchrec_bls.direct.process import is_alive, this_process
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.errors import BLSError, PeerTimeoutError, ProtocolError, RendezvousError

DEADLINE = 30.0


def tables_of(model: Any) -> SharedTables:
    """Returns those of the first module, which announces for all."""
    reads = next(iter(bounded_lag_modules(model).values())).direct_reads
    assert reads is not None
    return reads.tables


def serve_through(rank: int, struck: int, number: int, batches_number: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if rank == struck:
        os.kill(os.getpid(), number)
        return  # once it goes on
    tables = tables_of(model)
    until(lambda: state_of(pids[struck]) in "TZX")
    for i in range(batches_number):
        assert check(model, batches, expected, i) == 1
    gone = number == signal.SIGKILL
    # Those that have finished are gone as well.
    if gone:
        assert struck in tables.owners_gone()
    elif rank == 0:
        assert struck not in tables.owners_gone()
        os.kill(pids[struck], signal.SIGCONT)


@pytest.mark.parametrize("batches", [200, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_others_serve_the_tables_of_a_rank_that_is_gone_or_stopped(
    number: int, batches: int
) -> None:
    outcomes = run_outcomes(4, serve_through, 2, number, batches)
    errors = [outcome.error for outcome in outcomes]
    struck = "ProcessDied" if number == signal.SIGKILL else None
    assert errors == [None, None, struck, None], "\n".join(map(str, outcomes))


def publish_for_the_dead(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    survivors = dist.new_group([0, 2])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    until(lambda: state_of(pids[1]) in "ZX")
    own = publish(model, weights_of(2), version="2")
    assert own.version == "2"
    with pytest.raises(PeerTimeoutError, match=r"\[1\] have no process: publish\(owner"):
        if rank == 0:
            own.wait(0.01)
        else:
            raise PeerTimeoutError("of which [1] have no process: publish(owner=...) for them")
    with pytest.raises(ValueError, match="have to come in a state_dict"):
        publish(model, version="2", owner=1)
    assert check(model, batches, expected, 0) == 1
    dist.barrier(survivors)
    if rank == 0:
        publish(model, weights_of(2), version="2", owner=1)
    own.wait(DEADLINE)
    for i in range(4):
        assert check(model, batches, expected, i) == 2


def test_a_survivor_publishes_for_an_owner_that_is_gone() -> None:
    outcomes = run_outcomes(3, publish_for_the_dead)
    errors = [outcome.error for outcome in outcomes]
    assert errors == [None, "ProcessDied", None], "\n".join(map(str, outcomes))


def die_half_way(rank: int, after: str) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    own = publish(model, weights_of(2), version="2") if rank == 0 else None
    if rank == 1:
        _die(after)
        publish(model, weights_of(2), version="2")
        raise AssertionError("lives")
    until(lambda: state_of(pids[1]) in "ZX")
    assert own is not None
    for i in range(20):
        assert check(model, batches, expected, i) == 1
    assert not own.serves
    publish(model, weights_of(2), version="2", owner=1)
    own.wait(DEADLINE)
    assert check(model, batches, expected, 0) == 2


def _die(after: str) -> None:
    """Has this process killed when it publishes: after its first segment, or the first record."""

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    from torchrec_bls.direct.serving.publisher import Publisher

    original = SharedTables.create

    def create_one(self: SharedTables, *args: Any) -> Any:
        original(self, *args)
        die()

    if after == "a segment":
        SharedTables.create = create_one  # type: ignore[method-assign, assignment]
    else:
        announce = Publisher.announce

        def record_one(
            self: Publisher, owner: int, serial: int, version: str, parts: Any, end: float
        ) -> None:
            first = next(iter(self.tables.values()))
            first.page.record(owner, serial, version, parts[0].index.address)
            die()
            announce(self, owner, serial, version, parts, end)

        Publisher.announce = record_one  # type: ignore[method-assign]


@pytest.mark.parametrize("after", ["a segment", "a record"])
def test_a_publisher_that_dies_half_way_leaves_the_old_version(after: str) -> None:
    outcomes = run_outcomes(2, die_half_way, after)
    errors = [outcome.error for outcome in outcomes]
    assert errors == [None, "ProcessDied"], "\n".join(map(str, outcomes))


def publish_without_memory(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    if rank == 0:
        create, calls = SharedTables.create, []

        def create_one(self: SharedTables, owner: int, version: str, *args: Any) -> Any:
            calls.append(owner)
            if len(calls) == 1:
                return create(self, owner, version, *args)
            # The second module's: more than any host has.
            label = (owner, version, self.digest)
            return _native.TableSegment.create(label, [], 1 << 60, False)

        SharedTables.create = create_one  # type: ignore[method-assign]
        says = r"no memory for the tables of rank 0 in ver.*publish\(\.\.\., drain=True\), which"
        with pytest.raises(RendezvousError, match=says):
            publish(model, weights_of(2), version="2")
        SharedTables.create = create  # type: ignore[method-assign]
        assert tables_of(model).page.pending(0) == (0, "")
        assert check(model, batches, expected, 0) == 1
    publish(model, weights_of(2), version="2").wait(DEADLINE)
    assert check(model, batches, expected, 0) == 2


def test_missing_memory_is_an_error_before_anything_changes() -> None:
    run(2, publish_without_memory)


def fall_behind(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    for version in range(2, 6):
        publish(model, weights_of(version), version=str(version), deadline=DEADLINE).wait(DEADLINE)
    # It had no batch meanwhile.
    assert check(model, batches, expected, 0) == 5
    dist.barrier()  # nobody else holds the segments of who ends before the others have mapped them


def test_a_reader_that_is_older_than_the_recorded_versions_takes_the_newest() -> None:
    run(2, fall_behind)


def announce_others(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    tables = tables_of(model)
    if rank == 0:
        no_index = _native.TableSegment.create((0, "2", tables.digest), [], 8192, False)
        older = _native.TableSegment.create((0, "1", tables.digest), [], 8192, False)
        foreign = _native.TableSegment.create((0, "2", bytes(32)), [], 8192, False)
        for segment, text in (
            (no_index, "what was announced as the index of the tables of rank 0 lists no pieces"),
            (older, "version '1', not of rank 0 and version '2'"),
            (foreign, "has other shards"),
        ):
            tables.page.record(0, 2, "2", segment.address)
            with pytest.raises(ProtocolError, match=text):
                tables.open(0, 2, "2")
        pid, descriptor, device, inode, size = no_index.address
        tables.page.record(0, 2, "2", (pid, descriptor, device, inode + 1_000_000, size))
        with pytest.raises(BLSError, match="not there any more"):
            tables.open(0, 2, "2")
    assert check(model, batches, expected, 0) == 1


def test_segments_that_are_not_what_was_announced_are_refused() -> None:
    run(2, announce_others)


def test_a_file_is_found_by_whoever_holds_it() -> None:
    segment = _native.TableSegment.create((0, "1", bytes(32)), [], 8192, False)
    _, descriptor, device, inode, _ = segment.address
    file = device, inode
    other = _native.TableSegment.create((0, "1", bytes(32)), [], 8192, False)
    _, its_descriptor, *its_file, _ = other.address
    assert holders_of([file]) == {file: (os.getpid(), descriptor)}
    held = {file: (os.getpid(), descriptor), tuple(its_file): (os.getpid(), its_descriptor)}
    assert holders_of([file, tuple(its_file)]) == held
    del segment
    assert holders_of([file]) == {}


def test_a_process_is_told_from_those_before_it() -> None:
    own = this_process().identity
    assert is_alive(own)
    assert not is_alive(own + (1 << 22))
    assert not is_alive(0)


def serve_while_publishers_crash(rank: int, batches_number: int, every: int) -> None:
    """Rank 1 publishes for itself; rank 2 crashes at its second publication."""
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    last = 1 + batches_number // every
    for version in range(1, last + 1):
        expected.of(version, 0)
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    survivors = dist.new_group([0, 1])
    failures: list[BaseException] = []
    seen = [1]

    def publish_all() -> None:
        try:
            for version in range(2, last + 1):
                if rank == 2 and version == 3:
                    _die("a record")
                publication = publish(
                    model, weights_of(version), version=str(version), deadline=DEADLINE
                )
                assert publication.version == str(version)
                if rank == 0 and version >= 3:
                    until(lambda: state_of(pids[2]) in "ZX")
                    publish(model, weights_of(version), version=str(version), owner=2)
                publication.wait(DEADLINE)
                # So that every version has its batches.
                until(
                    lambda version=version: (
                        seen[-1] == version and len(seen) >= every * (version - 1)
                    )
                )
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=publish_all)
    thread.start()
    number = 0
    while number < batches_number or seen[-1] < last:
        seen.append(check(model, batches, expected, number))
        number += 1
        assert not failures, failures
    thread.join()
    assert seen == sorted(seen) and set(seen) == set(range(1, last + 1))
    # The tables of a process that has ended can't be mapped any more.
    dist.barrier(survivors)


@pytest.mark.parametrize(
    ("batches", "every"), [(400, 80), pytest.param(10_000, 500, marks=pytest.mark.slow)]
)
def test_every_output_is_of_one_version_while_a_publisher_crashes(batches: int, every: int) -> None:
    outcomes = run_outcomes(3, serve_while_publishers_crash, batches, every, deadline=300.0)
    errors = [outcome.error for outcome in outcomes]
    assert errors == [None, None, "ProcessDied"], "\n".join(map(str, outcomes))

"""Which processes read the tables, and which versions they hold: all say the same."""

import gc
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.direct import nodes, served
from tests.direct.forked import fork, leave
from tests.direct.nodes import DEADLINE, Node, Nodes, started, until
from tests.direct.served import Expected, batches_of, check
from tests.processes import run
from torchrec_bls import _native, attach, offer, publish, serving_state
from torchrec_bls.direct.process import is_alive, this_process
from torchrec_bls.direct.serving import readers
from torchrec_bls.direct.serving.served_model import ServedModel

SLOTS = 256


def pids(processes: Nodes, *names: object) -> dict[object, int]:
    return {name: processes.call(name, nodes.pid_of) for name in names}


def until_behind(processes: Nodes, asked: object, expected: dict[int, int]) -> None:
    until(lambda: processes.call(asked, nodes.state).readers_behind == expected)


def test_all_processes_see_all_readers(tmp_path: Path) -> None:
    with started(tmp_path, 2) as processes:
        processes.start("reader")
        processes.call("reader", nodes.join, 1)
        fork(processes, "reader", "child")
        pid = pids(processes, 0, 1, "reader", "child")
        assert pid["child"] not in processes.call(0, nodes.state).readers
        processes.call("child", nodes.check, 1)
        for name in pid:
            state = processes.call(name, nodes.state)
            assert sorted(state.readers) == sorted(pid.values())
            assert (state.readers_behind, state.uncounted) == ({}, False)
        leave(processes, "child")
        processes.kill("reader")
        for name in (0, 1):
            left = processes.call(name, nodes.state).readers
            assert sorted(left) == sorted([pid[0], pid[1]])


def test_a_process_without_batches_holds_its_version(tmp_path: Path) -> None:
    with started(tmp_path, 1) as processes:
        processes.start("idle")
        processes.call("idle", nodes.join, 0)
        fork(processes, "idle", "child")
        processes.call("child", nodes.check, 1)
        pid = pids(processes, 0, "idle", "child")
        for version in (2, 3):
            processes.call(0, nodes.publish_all, version)
            processes.call(0, nodes.go_over, version)
            until_behind(processes, 0, {pid["idle"]: 1, pid["child"]: 1})
        processes.call("child", nodes.go_over, 3)
        until_behind(processes, "idle", {pid["idle"]: 1})
        processes.call("idle", nodes.go_over, 3)
        until_behind(processes, "child", {})


def test_a_stopped_process_holds_its_version_until_it_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, 1) as processes:
        processes.start("stopped")
        processes.call("stopped", nodes.join, 0)
        pid = pids(processes, "stopped")["stopped"]
        os.kill(pid, signal.SIGSTOP)
        try:
            processes.call(0, nodes.publish_all, 2)
            processes.call(0, nodes.go_over, 2)
            until_behind(processes, 0, {pid: 1})
        finally:
            os.kill(pid, signal.SIGKILL)
        until_behind(processes, 0, {})
        assert pid not in processes.call(0, nodes.state).readers


def holds(model: Any) -> int:
    """Returns the oldest version that a process with all tables says that it holds."""
    return readers.readers_of(page_of(model))[os.getpid()]


def holds_alone(model: Any, serial: int) -> bool:
    return holds(model) == serial


def page_of(model: Any) -> _native.ControlPage:
    return ServedModel.of(model).reads[0].tables.page


def hold_in_several_ways(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)

    def change_to(version: int) -> None:
        publish(model, served.weights_of(version), version=str(version)).wait(DEADLINE)
        assert check(model, batches, expected, 0) == version

    assert holds(model) == 1
    # A tensor that was taken from the weights, which have moved on: first the loaded ones, then
    # those of a switch. Before the second version is mapped, what nobody holds is told as gone.
    weight = next(iter(model.module.bags.embedding_bags.values())).weight
    for version in (2, 4):
        kept = weight.detach()
        before = kept.clone()
        change_to(version)
        change_to(version + 1)
        assert holds(model) == version - 1
        assert torch.equal(kept, before) and not torch.equal(weight, before)
        del kept
        until(partial(holds_alone, model, version + 1))
    # What another thread's lookup reads.
    view: Any = ServedModel.of(model).reads[1]._view.of(batches[0].keys())
    features = view.features
    del view
    change_to(6)
    change_to(7)
    assert holds(model) == 5
    del features
    until(partial(holds_alone, model, 7))
    # A generation that no batch has taken is held, and newer.
    publish(model, served.weights_of(8), version="8").wait(DEADLINE)
    state = serving_state(model)
    assert (state.serial, state.announced_serial) == (7, 8)
    assert state.readers_behind == {os.getpid(): 7}
    assert check(model, batches, expected, 0) == 8
    until(lambda: serving_state(model).readers_behind == {})


def test_a_version_is_held_as_long_as_anything_shows_or_reads_it() -> None:
    run(1, hold_in_several_ways, deadline=120)


def release_with_the_model(rank: int, folder: str) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    with offer(model, f"{folder}/source"):
        page = page_of(model)
        own = this_process().identity
        assert page.readers() == [(own, 1)]
        joined = nodes.bare_model()
        attach(joined, f"{folder}/source", deadline=DEADLINE)
        assert page.readers() == [(own, 1)] * 2
        publish(model, served.weights_of(2), version="2").wait(DEADLINE)
        assert check(model, batches, expected, 0) == 2
        # One process, whose oldest version counts.
        until(lambda: sorted(page.readers()) == [(own, 1), (own, 2)])
        assert serving_state(model).readers_behind == {os.getpid(): 1}
        del joined
        gc.collect()
        until(lambda: page.readers() == [(own, 2)])
        assert serving_state(model).readers == (os.getpid(),)
    del model
    gc.collect()
    until(lambda: page.readers() == [])


def test_a_slot_goes_back_with_its_model(tmp_path: Path) -> None:
    run(1, release_with_the_model, str(tmp_path))


def fill_all_slots(rank: int, folder: str) -> None:
    model, batches = served.sharded(), batches_of(rank)
    check(model, batches, Expected(batches), 0)
    page, others = page_of(model), list[Any]()
    assert not serving_state(model).uncounted
    identity = this_process().identity
    while (slot := _native.ReaderSlot.take(page, identity, 1, lambda _: True)) is not None:
        others.append(slot)
    assert len(others) == SLOTS - 1
    readers._REST = 0.0
    with offer(model, f"{folder}/source"):
        late = nodes.bare_model()
        attach(late, f"{folder}/source", deadline=DEADLINE)
        # It reads and follows all the same.
        assert serving_state(late).uncounted and not serving_state(model).uncounted
        publish(model, served.weights_of(2), version="2").wait(DEADLINE)
        until(lambda: check(late, batches, Expected(batches), 0) == 2)
        assert serving_state(late).uncounted
        others.pop()
        until(lambda: not serving_state(late).uncounted)
        assert len(page.readers()) == SLOTS


def test_a_reader_without_a_slot_reads_uncounted(tmp_path: Path) -> None:
    run(1, fill_all_slots, str(tmp_path))


def test_a_dead_readers_slot_is_free() -> None:
    """The number of a process that is gone is not that of any that lives."""
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    page = _native.ControlPage.create(1, bytes(32))
    dead = 12345 << 22 | gone
    os.waitpid(gone, 0)
    kept = [_native.ReaderSlot.take(page, dead, 1, lambda _: True) for _ in range(SLOTS)]
    assert all(slot is not None for slot in kept)
    assert readers.readers_of(page) == {}
    own = this_process().identity
    taken = _native.ReaderSlot.take(page, own, 7, is_alive)
    assert taken is not None and readers.readers_of(page) == {os.getpid(): 7}


def test_a_pin_keeps_its_slot() -> None:
    page = _native.ControlPage.create(1, bytes(32))
    slot = _native.ReaderSlot.take(page, this_process().identity, 1, is_alive)
    assert slot is not None and slot.pin(1, 5) is None
    page.set_serial_on(1, 5)
    pin, again = slot.pin(1, 5), slot.pin(1, 5)
    assert pin is not None and again is not None and slot.pin(0, 5) is None
    page.set_serial_on(1, 0)
    assert slot.pin(1, 5) is None
    del slot, again
    gc.collect()
    assert readers.holders_of_side(page, 1) == [os.getpid()]
    assert readers.holders_of_side(page, 0) == []
    del pin
    assert readers.holders_of_side(page, 1) == [] and page.readers() == []


def test_a_signal_while_a_slot_is_taken_takes_none() -> None:
    page = _native.ControlPage.create(1, bytes(32))
    kept = [_native.ReaderSlot.take(page, 1 + i, 1, lambda _: True) for i in range(SLOTS)]

    def interrupted(_: int) -> bool:
        raise KeyboardInterrupt

    before = page.readers()
    with pytest.raises(KeyboardInterrupt):
        _native.ReaderSlot.take(page, 1000, 1, interrupted)
    assert page.readers() == before and len(kept) == SLOTS


def fail_to_publish(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    check(model, batches, Expected(batches), 0)
    assert serving_state(model).failed_publishes == 0
    for wrong in ({}, {"dense.weight": torch.ones(1)}):
        with pytest.raises(ValueError):
            publish(model, wrong, version="2")
    publish(model, served.weights_of(2), version="2").wait(DEADLINE)
    assert serving_state(model).failed_publishes == 2


def test_failed_publications_are_counted() -> None:
    run(1, fail_to_publish)


def facts_of(processes: Nodes, name: object) -> tuple[Any, ...]:
    state = processes.call(name, nodes.state)
    return state.published, state.publish_seconds, state.bytes_written, state.bytes_reused


def publish_one_table(node: Node, of: int, table_of: int) -> None:
    """Publishes the weights of one version with a table of another."""
    name = "rows.embeddings.t0.weight"
    new = served.weights_of(of) | {name: served.weights_of(table_of)[name]}
    publish(node.model, new, version=f"{of} but for a table", deadline=DEADLINE)


def take_one(node: Node, serial: int) -> None:
    """Looks batches up until a version serves."""

    def is_read() -> bool:
        with torch.no_grad():
            node.model(node.batches[0])
        return int(serving_state(node.model).serial) == serial

    until(is_read)


def test_all_processes_know_the_facts_of_a_version(tmp_path: Path) -> None:
    names = [0, 1, "reader"]
    with started(tmp_path, 2) as processes:
        processes.start("reader")
        processes.call("reader", nodes.join, 0)
        for name in names:
            assert facts_of(processes, name) == (None,) * 4
            assert processes.call(name, nodes.state).age is None
        begun = time.time()
        processes.call_all([0, 1], nodes.publish_all, 2)
        processes.call_all(names, nodes.go_over, 2)
        [first] = {facts_of(processes, name) for name in names}
        published, seconds, written, reused = first
        assert begun <= published <= time.time() and 0 < seconds <= published - begun + 1
        assert written > 0 == reused
        ages = [processes.call(name, nodes.state).age for name in names]
        assert min(ages) >= 0 and max(ages) <= time.time() - begun
        processes.call_all([0, 1], publish_one_table, 2, 3)
        processes.call_all(names, take_one, 3)
        [second] = {facts_of(processes, name) for name in names}
        assert second[0] > published
        assert 0 < second[2] < written and second[2] + second[3] == written

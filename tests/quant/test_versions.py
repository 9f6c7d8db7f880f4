"""Quantized tables change with float ones: all of a version or nothing, with FBGEMM's bits."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.direct import nodes
from tests.direct.forked import fork
from tests.direct.nodes import Node, NodeFailedError, started
from tests.processes import run
from tests.quant import served
from tests.quant.served import Expected, batches_of, check, check_live, unsharded, weights_of
from torchrec_bls import BLSConfig, attach, publish, serving_state, version_of
from torchrec_bls.direct.serving.served_model import ServedModel
from torchrec_bls.direct.serving.versions import Versions

DEADLINE = 60.0
SERVED = "tests.quant.served"
PARTLY = "tests.quant.partly_changed"


def publish_new_weights(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    assert check(model, batches, expected, 0) == 1
    for version, new in (
        (2, weights_of(2)),
        (3, unsharded(3).state_dict()),  # rows as they are stored
    ):
        dist.barrier()
        if rank == 0:
            first = publish(model, new, version=str(version))
            assert not first.serves  # one owner of two has announced it
            for number in range(4):
                assert check(model, batches, expected, number) == version - 1
        dist.barrier()
        own = first if rank == 0 else publish(model, new, version=str(version))
        own.wait(DEADLINE)
        for number in range(4):
            assert check(model, batches, expected, number) == version
        check_live(model, version)
    write_and_publish(rank, model, batches, expected)
    dist.barrier()  # nobody else holds the segments of who ends before the others have mapped them


def write_and_publish(rank: int, model: Any, batches: list[Any], expected: Expected) -> None:
    """Weights that are loaded into the model become a version; those that are not are given up."""
    bags = model.module.bags
    bags.embedding_bags["b0"].weight.zero_()
    bags.embedding_bags["b1"].weight.elem.zero_()
    with torch.no_grad(), pytest.raises(ValueError, match=r"written to.*Publish them"):
        model(batches[0])
    assert publish(model, weights_of(3), version="3").was_announced
    assert check(model, batches, expected, 1) == 3
    check_live(model, 3)
    dist.barrier()
    served.write_in_place(model, 4)
    publish(model, version="4").wait(DEADLINE)
    for number in range(4):
        assert check(model, batches, expected, number) == 4
    check_live(model, 4)


def test_versions_have_the_bits_of_fbgemms_lookup_in_one_process() -> None:
    run(2, publish_new_weights)


def publish_in_huge_pages(rank: int) -> None:
    config = BLSConfig(lookup="direct", deadline=30.0, huge_pages=True)
    model, batches = served.sharded(config), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    for version in (2, 3):
        publish(model, weights_of(version), version=str(version)).wait(DEADLINE)
        for number in range(2):
            assert check(model, batches, expected, number) == version
        check_live(model, version)
    dist.barrier()


def test_versions_in_pages_of_2_mib() -> None:
    run(2, publish_in_huge_pages)


def read_while_others_publish(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    last = 6
    for version in range(1, last + 1):
        expected.of(version, 0)
    check(model, batches, expected, 0)
    serving_state(model)
    seen: list[set[int]] = [set(), set()]
    errors: list[BaseException] = []

    def read(versions: set[int]) -> None:
        try:
            number = 0
            while last not in versions:
                versions.add(number_read(model, batches, expected, number))
                number += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(each,)) for each in seen]
    for thread in threads:
        thread.start()
    for version in range(2, last + 1):
        publish(model, weights_of(version), version=str(version)).wait(DEADLINE)
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    assert not errors, errors
    dist.barrier()


def number_read(model: Any, batches: list[Any], expected: Expected, number: int) -> int:
    """Returns which version all of a batch is of."""
    batch = number % len(batches)
    with torch.no_grad():
        output = model(batches[batch])
    for version in range(1, 7):
        theirs = expected.of(version, batch)
        if all(torch.equal(output[name], tensor) for name, tensor in theirs.items()):
            return version
    raise AssertionError(f"batch {number} is of no version")


def test_no_batch_of_any_thread_sees_two_versions() -> None:
    run(2, read_while_others_publish)


def publish_and_die(node: Node, version: int, records: int) -> None:
    """Is killed when its segments are made and recorded for some modules, before or after they are
    announced."""
    reads: Any = ServedModel.of(node.model).reads
    pages = [each.tables.page for each in reads]

    def announce(_: Versions, owner: int, serial: int, version: str, parts: list[Any]) -> None:
        for page, part in list(zip(pages, parts, strict=True))[:records]:
            page.record(owner, serial, version, part.index.address)
        if records > len(pages):
            pages[0].announce(owner, serial)
        os.kill(os.getpid(), signal.SIGKILL)

    Versions.announce = announce  # type: ignore[assignment,method-assign]
    nodes.publish_all(node, version)


@pytest.mark.parametrize("records", [1, 3, 4])
def test_a_publisher_dies_between_two_steps(tmp_path: Path, records: int) -> None:
    """Its segments are gone with it, even if its version was decided by then."""
    with started(tmp_path, 2, SERVED) as processes:
        processes.start("reader")
        processes.call("reader", nodes.join, 0)
        processes.call(0, nodes.publish_all, 2)
        pid = processes.call(1, nodes.pid_of)
        processes.begin(1, publish_and_die, 2, records)
        nodes.until(lambda: nodes.state_of(pid) in "ZX")
        # What was decided may have been mapped before it was gone.
        seen = processes.call_all([0, "reader"], nodes.check, None if records == 4 else 1)
        assert set(seen) <= {1, 2}
        processes.call(0, nodes.publish_all, 3, 1)
        processes.call(0, nodes.publish_all, 3)
        processes.call_all([0, "reader"], nodes.go_over, 3)


def refuse_other_models(node: Node, source: object) -> None:
    model = served.quantized(served.Model("meta"), first_types=1)
    before = list(model.modules())
    with pytest.raises(ValueError, match=r"table 'b0' \(700, 8, 'INT4'.*but \(700, 8, 'INT8'"):
        attach(model, node.path_of(source), deadline=DEADLINE)
    assert list(model.modules()) == before
    with pytest.raises(ValueError, match="'bags' has rows float in this model, but quantized at"):
        attach(served.Model("meta"), node.path_of(source), deadline=DEADLINE)


def test_readers_follow_and_take_the_place_of_ranks_that_died(tmp_path: Path) -> None:
    with started(tmp_path, 2, SERVED) as processes:
        for name in ("reader", "returned"):
            processes.start(name)
        processes.call("reader", nodes.join, 0, None, "reader")
        processes.call("reader", refuse_other_models, 0)
        processes.call_all([0, 1], nodes.publish_all, 2)
        processes.call_all([0, 1, "reader"], nodes.go_over, 2)
        # Its segments of version 3 are gone with it.
        processes.call(0, nodes.publish_all, 3)
        pid = processes.call(1, nodes.pid_of)
        processes.begin(1, publish_and_die, 3, 0)
        nodes.until(lambda: nodes.state_of(pid) in "ZX")
        processes.call_all([0, "reader"], nodes.check, 2)
        assert processes.call("reader", nodes.state).owners_gone == (1,)
        # Another process publishes for it; then one takes its place, and needs no rank for that.
        processes.call(0, nodes.publish_all, 3, 1)
        processes.call_all([0, "reader"], nodes.go_over, 3)
        processes.kill(0)
        processes.call("returned", nodes.join, "reader", 1)
        assert processes.call("returned", nodes.state).rank == 1
        processes.call("returned", nodes.publish_all, 4)
        processes.call("returned", nodes.publish_all, 4, 0)
        processes.call_all(["reader", "returned"], nodes.go_over, 4)


def test_children_and_successors_of_a_keeper(tmp_path: Path) -> None:
    """One process owns all tables. Its death costs readers nothing, and its successor loads
    nothing."""
    with started(tmp_path, 1, SERVED) as processes:
        for name in ("reader", "successor"):
            processes.start(name)
        processes.call("reader", nodes.join, 0, None, "reader")
        fork(processes, 0, "child")
        processes.call("child", nodes.check, 1)
        processes.call(0, nodes.publish_all, 2)
        processes.call_all(["child", "reader"], nodes.go_over, 2)
        with pytest.raises(NodeFailedError, match="this process was forked"):
            processes.call("child", nodes.publish_all, 3)
        processes.kill(0)
        processes.call_all(["child", "reader"], nodes.check, 2)
        processes.call("successor", nodes.join, "reader", 0)
        processes.call("successor", nodes.publish_all, 3)
        processes.call_all(["child", "reader", "successor"], nodes.go_over, 3)


def refuse_weights(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    name = "bags.embedding_bags.b0.weight"
    good = weights_of(2)
    for change, says in (
        (good[name][:-1], r"shape \(699, 8\) in the state_dict, but its table is \(700, 8\)"),
        (good[name].double(), "must be on the CPU: float32 or float16 to be quantized, or uint8"),
        (good[name].to("meta"), "torch.float32 on meta"),
        (good[name].to_sparse(), "of the layout torch.sparse_coo"),
        (torch.zeros(700, 8, dtype=torch.uint8), r"'b0' has INT8 rows of \(700, 16\)"),
        ([1.0], "is a list in the state_dict: give the whole table as a tensor"),
        (None, "the state_dict has no 'bags.embedding_bags.b0.weight'"),
    ):
        new = {key: value for key, value in good.items() if change is not None or key != name}
        if change is not None:
            new[name] = change  # type: ignore[assignment]
        with pytest.raises(ValueError, match=says):
            publish(model, new, version="2")
    assert serving_state(model).pending == {}
    assert check(model, batches, expected, 1) == 1 and version_of(model) != "2"


def test_weights_that_do_not_fit_are_refused_and_nothing_is_announced() -> None:
    run(1, refuse_weights)


def reused_by(node: Node, version: int) -> int:
    """Returns how many bytes of a publication are those of the version before."""
    new = node.served.weights_of(version)
    publication = publish(node.model, new, version=str(version), deadline=DEADLINE)
    publication.wait(DEADLINE)
    return publication.bytes_reused


def test_a_version_of_pieces_of_several_versions_outlives_its_publishers(tmp_path: Path) -> None:
    with started(tmp_path, 1, PARTLY) as processes:
        for name in ("reader", "successor", "late"):
            processes.start(name)
        processes.call("reader", nodes.join, 0, None, "reader")
        fork(processes, "reader", "child")
        for version in (2, 3):
            reused = processes.call(0, reused_by, version)
            assert (reused > 0) == (version == 3)
            processes.call_all(["reader", "child"], nodes.go_over, version)
        processes.kill(0)
        # It has the pieces from the reader, and takes them into its own versions.
        processes.call("successor", nodes.join, "reader", 0, "successor")
        assert processes.call("successor", reused_by, 4) == 0
        processes.call_all(["reader", "child"], nodes.go_over, 4)
        assert processes.call("successor", reused_by, 5) > 0
        processes.call_all(["reader", "child"], nodes.go_over, 5)
        processes.kill("successor")
        processes.call("late", nodes.join, "reader")
        processes.call_all(["reader", "child", "late"], nodes.check, 5)


@pytest.mark.slow
@pytest.mark.parametrize("served_by", [SERVED, PARTLY])
def test_ten_thousand_batches_while_publishers_come_and_go(tmp_path: Path, served_by: str) -> None:
    """Four readers check every batch. The keeper dies in the middle of its tenth publication."""
    readers = [f"reader {number}" for number in range(4)]
    with started(tmp_path, 1, served_by) as processes:
        for name in [*readers, "successor"]:
            processes.start(name)
        for name in readers:
            processes.call(name, nodes.join, 0, None, name)
        for name in readers:
            processes.begin(name, nodes.check_many, 2500, f"begun by {name}")
        nodes.until(lambda: all((tmp_path / f"begun by {name}").exists() for name in readers))
        for version in range(2, 11):
            processes.call(0, nodes.publish_all, version)
        pid = processes.call(0, nodes.pid_of)
        processes.begin(0, publish_and_die, 11, 2)
        nodes.until(lambda: nodes.state_of(pid) in "ZX")
        processes.call("successor", nodes.join, readers[0], 0)
        for version in range(11, 21):
            processes.call("successor", nodes.publish_all, version)
        for name in readers:
            assert processes.end(name) > 1
        processes.call_all([*readers, "successor"], nodes.go_over, 20)

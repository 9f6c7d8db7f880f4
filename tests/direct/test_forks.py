"""Forked children of processes that serve: readers that follow by themselves."""

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from tests.direct import nodes, served
from tests.direct.forked import fork, leave, tables_held
from tests.direct.nodes import DEADLINE, Node, started
from tests.direct.test_last_defence import no_descriptors
from torchrec_bls import _native, offer, publish, serving_state

LAYOUT = bytes(32)


def publish_in_vain(node: Node) -> None:
    for owner in (None, 0):
        with pytest.raises(ValueError, match=r"was forked from process \d+, and reads its tables"):
            publish(
                node.model,
                served.weights_of(2),
                version="2",
                owner=owner,
                deadline=DEADLINE,
            )


def test_a_child_follows_and_publishes_nothing(tmp_path: Path) -> None:
    with started(tmp_path, 2) as processes:
        fork(processes, 0, "child")
        processes.call("child", publish_in_vain)
        assert processes.call("child", nodes.check, 1) == 1
        processes.call("child", publish_in_vain)
        processes.call(0, nodes.publish_all, 2)
        assert processes.call("child", nodes.check) == 1
        processes.call(1, nodes.publish_all, 2)
        for name in (0, 1, "child"):
            processes.call(name, nodes.go_over, 2)


def test_a_child_begins_with_counts_of_its_own(tmp_path: Path) -> None:
    with started(tmp_path, 1) as processes:
        processes.start("reader")
        processes.call("reader", nodes.join, 0)
        fork(processes, 0, "child")
        parent, child = (processes.call(name, nodes.state) for name in (0, "child"))
        assert parent.rank == 0 and sum(parent.rows_read) > 0
        assert (child.rank, sum(child.rows_read)) == (None, 0)
        assert child.owners_gone == ()


def test_a_child_of_a_reader_and_its_child_follow(tmp_path: Path) -> None:
    with started(tmp_path, 1) as processes:
        processes.start("reader")
        processes.call("reader", nodes.join, 0)
        fork(processes, "reader", "child")
        fork(processes, "child", "grandchild")
        for name in ("child", "grandchild"):
            processes.call(name, publish_in_vain)
        processes.call(0, nodes.publish_all, 2)
        for name in ("grandchild", "child", "reader"):
            processes.call(name, nodes.go_over, 2)


def test_children_outlive_their_parent_and_hand_its_tables_on(tmp_path: Path) -> None:
    """A child offers, and becomes the parent's successor, as any process does: by attaching."""
    with started(tmp_path, 1) as processes:
        fork(processes, 0, "child")
        processes.kill(0)
        assert processes.call("child", nodes.check, 1) == 1
        assert processes.call("child", nodes.state).owners_gone == (0,)
        processes.call("child", offer_as, "child")
        processes.start("successor")
        processes.call("successor", nodes.join, "child", 0)
        processes.call("successor", nodes.publish_all, 2)
        processes.call("child", nodes.go_over, 2)
        processes.kill("successor")
        processes.call("child", nodes.join, "child", 0)
        processes.call("child", nodes.publish_all, 3)
        processes.call("child", nodes.go_over, 3)


def offer_as(node: Node, name: str) -> None:
    node.offers.append(offer(node.model, node.path_of(name)))


def test_a_child_that_exits_leaves_its_parents_offer(tmp_path: Path) -> None:
    with started(tmp_path, 1) as processes:
        fork(processes, 0, "child")
        fork(processes, 0, "closes")
        processes.call("closes", close_offers)
        leave(processes, "child")
        processes.start("reader")
        processes.call("reader", nodes.join, 0)


def close_offers(node: Node) -> None:
    for each in node.offers:
        each.close()


def test_the_offer_of_a_dead_process_is_dead_though_its_child_lives(tmp_path: Path) -> None:
    with started(tmp_path, 2) as processes:
        fork(processes, 0, "child")
        processes.kill(0)
        processes.start("successor")
        with pytest.raises(nodes.NodeFailedError, match="nobody listens at"):
            processes.call("successor", nodes.join, 0)
        processes.call("successor", nodes.join, 1, 0)
        processes.call("successor", offer_as, "0")


def test_a_connection_ends_with_its_process_though_a_child_lives(tmp_path: Path) -> None:
    """The child was forked while another process was attaching."""
    with started(tmp_path, 1) as processes:
        processes.start("attaching")
        processes.call("attaching", begin_attaching)
        fork(processes, 0, "child")
        processes.kill(0)
        processes.call("attaching", end_attaching)


def begin_attaching(node: Node) -> None:
    node.model = connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.connect(node.path_of(0))
    assert connected.recv(8) == b"tbbloffr"


def end_attaching(node: Node) -> None:
    node.model.settimeout(DEADLINE)
    while node.model.recv(1 << 16):
        pass


def test_four_children_follow_twenty_publishes_and_one_of_them_exits(tmp_path: Path) -> None:
    names = [f"child {number}" for number in range(4)]
    with started(tmp_path, 1) as processes:
        for name in names:
            fork(processes, 0, name)
        held = 0
        for generation in range(2, 22):
            processes.call(0, nodes.publish_all, generation)
            processes.call_all(names, nodes.go_over, generation)
            if generation == 3:
                held = max(processes.call_all(names, tables_held))
            if generation == 11:
                leave(processes, names.pop())
        # One generation may still be on its way out.
        assert max(processes.call_all(names, tables_held)) <= held + 2
        processes.call(0, nodes.go_over, 21)
        processes.start("reader")
        processes.call("reader", nodes.join, 0)


def test_weights_that_the_parent_has_not_published_are_its_own(tmp_path: Path) -> None:
    with started(tmp_path, 1) as processes:
        processes.call(0, write)
        fork(processes, 0, "child")
        with pytest.raises(nodes.NodeFailedError, match="and not published them when it forked"):
            processes.call("child", nodes.check, 1)
        processes.call(0, nodes.publish_all, 2)
        processes.call("child", serve_again, 2)


def serve_again(node: Node, generation: int) -> None:
    def serves() -> bool:
        with suppress(ValueError):
            return nodes.check(node) == generation
        return False

    nodes.until(serves)


def write(node: Node) -> None:
    with torch.no_grad():
        for parameter in node.model.parameters():
            parameter.add_(1)


def serve_before_anybody_follows(node: Node) -> None:
    node.model = served.sharded()
    nodes.check(node, 1)


def test_a_child_of_a_parent_that_does_not_follow_says_so(tmp_path: Path) -> None:
    processes = nodes.Nodes(tmp_path)
    try:
        processes.start_ranks(1)
        processes.call(0, serve_before_anybody_follows)
        fork(processes, 0, "child")
        with pytest.raises(nodes.NodeFailedError, match=r"call serving_state\(model\) there"):
            processes.call("child", nodes.check, 1)
        assert processes.call("child", nodes.state).rank is None
        processes.call(0, nodes.publish_all, 2)
        processes.call("child", nodes.go_over, 2)
    finally:
        processes.close()


def use_threads(_: Node, count: int) -> None:
    torch.set_num_threads(count)


def test_a_child_does_not_wait_for_threads_of_its_parent(tmp_path: Path) -> None:
    processes = nodes.Nodes(tmp_path)
    try:
        processes.start_ranks(1)
        processes.call(0, use_threads, 2)
        processes.call(0, nodes.serve)
        fork(processes, 0, "child")
        with pytest.raises(nodes.NodeFailedError, match=r"call torch\.set_num_threads\(1\) there"):
            processes.call("child", nodes.check, 1)
        processes.call("child", use_threads, 1)
        processes.call("child", nodes.check, 1)
        # With one thread before the fork a child may have as many as it wants.
        processes.call(0, use_threads, 1)
        processes.start("reader")
        processes.call("reader", nodes.join, 0)
        fork(processes, "reader", "second child")
        processes.call("second child", use_threads, 2)
        processes.call("second child", nodes.check, 1)
    finally:
        processes.close()


def write_to_the_page(node: Node) -> list[str]:
    page = node.model.bags.direct_reads.tables.page
    for act in (
        lambda: page.announce(0, 9),
        lambda: page.take_over(0, page.process(0), 9),
    ):
        with pytest.raises(ValueError, match="was forked from the one that mapped"):
            act()
    inode = os.fstat(page.descriptor).st_ino
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[1] for line in maps if line.split()[4] == str(inode)]


def test_a_child_maps_the_page_to_read_it(tmp_path: Path) -> None:
    with started(tmp_path, 1) as processes:
        processes.start("reader")
        processes.call("reader", nodes.join, 0)
        fork(processes, "reader", "child")
        assert processes.call("child", write_to_the_page) == ["r--s"]


def test_forks_do_not_keep_a_segment_from_being_sealed() -> None:
    content = torch.ones(16 << 20, dtype=torch.uint8)
    parts = [(content, _native.FIRST_TABLE_OFFSET)]
    size = _native.FIRST_TABLE_OFFSET + content.nbytes
    failures: list[BaseException] = []
    has_ended = threading.Event()

    def create_many() -> None:
        try:
            for _ in range(40):
                _native.TableSegment.create((0, "1", LAYOUT), parts, size, False)
        except BaseException as error:
            failures.append(error)
        has_ended.set()

    reading, writing = Pipe(duplex=False)
    thread = threading.Thread(target=create_many)
    thread.start()
    children = []
    while not has_ended.wait(0.002) and len(children) < 100:
        children.append(os.fork())
        if children[-1] == 0:
            writing.close()
            reading.poll(DEADLINE)  # until the parent closes its end
            os._exit(0)
    thread.join()
    writing.close()
    for child in children:
        os.waitpid(child, 0)
    assert children and not failures


_ATTACH = """
import sys
from tests.direct import served
from torchrec_bls import attach
attach(served.Model(), sys.argv[1])
"""


def test_another_user_namespace_is_refused_by_name(tmp_path: Path) -> None:
    with started(tmp_path, 1):
        command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", _ATTACH]
        ended = subprocess.run(
            [*command, str(tmp_path / "0")], capture_output=True, text=True, timeout=DEADLINE
        )
    assert ended.returncode == 1
    assert "run both in one PID namespace and one user namespace" in ended.stderr


def state_without_descriptors(node: Node) -> object:
    with no_descriptors():
        return serving_state(node.model)


def test_nobody_is_gone_for_want_of_descriptors(tmp_path: Path) -> None:
    with started(tmp_path, 2) as processes:
        assert processes.call(0, state_without_descriptors).owners_gone == ()
        processes.kill(1)
        assert processes.call(0, nodes.state).owners_gone == (1,)

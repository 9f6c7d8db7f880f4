"""Tables whose readers let go of a version before the next one is made."""

import os
import signal
from itertools import count
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.direct import nodes
from tests.direct.forked import fork
from tests.direct.nodes import DEADLINE, Node, NodeFailedError, Nodes, started, until
from tests.direct.test_keeper import KEEPER, SERVED, keep, kept, processes_of, stopped
from torchrec_bls import publish, serving_state, version_of
from torchrec_bls.direct import owner_part
from torchrec_bls.direct.serving.draining import Draining
from torchrec_bls.direct.serving.publisher import Publisher
from torchrec_bls.direct.serving.versions import Versions
from torchrec_bls.errors import DrainedError, PeerTimeoutError, RendezvousError

# Errors of batches in this process, with all that their frames refer to.
_kept: list[BaseException] = []
# A deadline that passes, since a process is stopped.
SOON = 2.0


def drain(node: Node, number: int, deadline: float = DEADLINE) -> int:
    """Publishes by a drain in a keeper's process; returns the bytes that were written."""
    new = node.served.weights_of(number)
    made = kept(node).publish(new, version=str(number), drain=True, deadline=deadline)
    assert kept(node).version == str(number)
    return made.bytes_written


def wait_in(node: Node, go: str) -> None:
    """Has the next publication of this process wait, after all readers have let go, for a file."""

    def create(publisher: Publisher, *args: Any) -> Any:
        Publisher.create = original  # type: ignore[method-assign]
        until(lambda: Path(node.path_of(go)).exists())
        return original(publisher, *args)

    original = Publisher.create
    Publisher.create = create  # type: ignore[method-assign]


def fail_in(node: Node) -> None:
    """Has the next publication of this process find no memory."""

    def create(publisher: Publisher, *args: Any) -> Any:
        Publisher.create = original  # type: ignore[method-assign]
        raise RendezvousError("no memory")

    original = Publisher.create
    Publisher.create = create  # type: ignore[method-assign]


def refuse(node: Node, number: int) -> None:
    """All batches raise, again and again. Whoever keeps the errors holds no later drain up."""
    for batch in [*node.batches, *node.batches]:
        with torch.no_grad(), pytest.raises(DrainedError) as raised:
            node.model(batch)
        _kept.append(raised.value)
        assert f"version '{number}' is made by process" in str(raised.value)
        assert "Send requests to another replica" in str(raised.value)
    assert serving_state(node.model).version == version_of(node.model) == "(drained)"


def last(node: Node) -> str:
    return version_of(node.model)


def be_drained(processes: Nodes, name: object, number: int) -> None:
    """A process lets go by itself."""
    until(lambda: processes.call(name, nodes.state).drained_for == str(number))
    assert processes.call(name, nodes.state).version == "(drained)"


def follow(processes: Nodes, name: object, version: int) -> None:
    """A process without batches changes to a version by itself."""
    until(lambda: processes.call(name, nodes.state).version == str(version))


def go_over(node: Node, version: int) -> None:
    """Waits for a version and looks all batches up in it. Until then batches may be refused."""

    def has_come() -> bool:
        try:
            return bool(node.served.check(node.model, node.batches, node.expected, 0) == version)
        except DrainedError:
            return False

    until(has_come)
    nodes.check(node, version)


@pytest.mark.parametrize("served_by", SERVED)
def test_readers_let_go_and_come_back(tmp_path: Path, served_by: str) -> None:
    """Those without batches, too. Who comes meanwhile is told to come again."""
    with processes_of(tmp_path, served_by, "owner", "busy", "idle", "late") as processes:
        processes.call("owner", keep, 1)
        processes.call_all(["busy", "idle"], nodes.join, KEEPER)
        for number in (2, 3):
            go = f"go{number}"
            processes.call("owner", wait_in, go)
            processes.begin("owner", drain, number)
            for name in ("busy", "idle"):
                be_drained(processes, name, number)
            processes.call("busy", refuse, number)
            with pytest.raises(NodeFailedError, match=r"RendezvousError: .* no version to hand"):
                processes.call("late", nodes.join, KEEPER)
            (tmp_path / go).touch()
            assert processes.end("owner") > 0
            follow(processes, "idle", number)
            assert processes.call("idle", last) == str(number - 1)  # of its last batch
            processes.call("idle", nodes.check, number)
            processes.call("busy", go_over, number)
        processes.call("late", nodes.join, KEEPER)
        assert processes.call("late", nodes.check, 3) == 3


def answer(node: Node, end: str) -> None:
    """Looks batches up until a file is there. Each answer is of the version that it says it is of.
    Another file tells that some were answered, and some refused."""
    answered = refused = 0
    while not Path(node.path_of(end)).exists():
        try:
            node.served.check(node.model, node.batches, node.expected, answered)
            answered += 1
        except DrainedError:
            refused += 1
        if answered and refused:
            Path(node.path_of(f"{node.name} saw both")).touch()


@pytest.mark.parametrize("served_by", SERVED)
def test_no_answer_is_of_two_versions(tmp_path: Path, served_by: str) -> None:
    readers = ["busy", "other"]
    with processes_of(tmp_path, served_by, "owner", *readers) as processes:
        processes.call("owner", keep, 1)
        processes.call_all(readers, nodes.join, KEEPER)
        for name in readers:
            processes.begin(name, answer, "end")

        def drain_twice() -> bool:
            for number in (2, 3):
                processes.call("owner", drain, number)
            return all((tmp_path / f"{name} saw both").exists() for name in readers)

        drain_twice()
        until(drain_twice)
        (tmp_path / "end").touch()
        for name in readers:
            processes.end(name)
            processes.call(name, go_over, 3)


@pytest.mark.parametrize("served_by", SERVED)
def test_a_stopped_reader_is_named_and_the_old_version_serves_on(
    tmp_path: Path, served_by: str
) -> None:
    with processes_of(tmp_path, served_by, "owner", "reader", "held") as processes:
        processes.call("owner", keep, 1)
        processes.call_all(["reader", "held"], nodes.join, KEEPER)
        with stopped(processes, "held") as pid:
            for _ in range(2):
                says = (
                    rf"PeerTimeoutError: processes .*{pid}.* have not let go of version '1' within"
                )
                with pytest.raises(NodeFailedError, match=says):
                    processes.call("owner", drain, 2, SOON)
                follow(processes, "reader", 1)
                processes.call_all(["owner", "reader"], go_over, 1)
        processes.call("held", go_over, 1)
        processes.call("owner", drain, 2)
        processes.call_all(["reader", "held"], go_over, 2)


def die_before(node: Node, where: str, number: int) -> None:
    """This process is killed in a drain: when readers are asked to let go, when they have, when the
    first piece is written, when the version is about to be announced, or when it was."""

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def made(*args: Any) -> Any:
        if next(pieces) == 1:
            die()
        return make(*args)

    def announce(versions: Versions, owner: int, serial: int, version: str, parts: Any) -> None:
        if version == str(number) and where == "announced":
            die()
        original(versions, owner, serial, version, parts)
        if version == str(number):
            die()

    pieces, make, original = count(), owner_part._made, Versions.announce
    if where == "asked":
        Draining._wait = die  # type: ignore[method-assign, assignment]
    elif where == "drained":
        Publisher.create = die  # type: ignore[method-assign, assignment]
    elif where == "written":
        owner_part._made = made
    else:
        Versions.announce = announce  # type: ignore[method-assign]
    drain(node, number)


def keep_or_load(node: Node, number: int) -> str:
    """Keeps what readers have, or loads. Returns the version that serves."""
    keep(node, number)
    return kept(node).version


@pytest.mark.parametrize("where", ["asked", "drained", "written", "announced", "after"])
@pytest.mark.parametrize("served_by", SERVED)
def test_an_owner_dies_in_a_drain(tmp_path: Path, served_by: str, where: str) -> None:
    """Its successor takes over what a reader still has, or loads; readers follow it."""
    with processes_of(tmp_path, served_by, "owner", "successor", "reader", "idle") as processes:
        processes.call("owner", keep, 1)
        processes.call_all(["reader", "idle"], nodes.join, KEEPER)
        pid = processes.call("owner", nodes.pid_of)
        processes.begin("owner", die_before, where, 2)
        until(lambda: nodes.state_of(pid) in "ZX")
        if where in ("drained", "written", "announced"):
            processes.call("reader", refuse_of_the_dead)
        serves = int(processes.call("successor", keep_or_load, 3))
        assert serves == 3 if where in ("drained", "written", "announced") else serves in (1, 2, 3)
        follow(processes, "idle", serves)
        processes.call_all(["reader", "idle"], go_over, serves)
        processes.call("successor", drain, 4)
        processes.call_all(["reader", "idle"], go_over, 4)


def refuse_of_the_dead(node: Node) -> None:
    with (
        torch.no_grad(),
        pytest.raises(DrainedError, match="was to be made by a process that is gone"),
    ):
        node.model(node.batches[0])


def publish_bad(node: Node, says: str, what: str) -> None:
    """Publishes weights with a fault."""
    new = node.served.weights_of(2)
    name = next(name for name in reversed(new) if ".embedding_bags." in name)
    if what == "nan":
        new[name][-1, -1] = nan
    elif what == "missing":
        del new[name]
    else:
        new[name] = new[name][:-1]
    with pytest.raises(ValueError, match=says):
        kept(node).publish(new, version="2", drain=True)
    if what == "nan":
        kept(node).publish(node.served.weights_of(1), version="same", drain=True)


@pytest.mark.parametrize("served_by", SERVED)
def test_what_cant_be_published_drains_nothing(tmp_path: Path, served_by: str) -> None:
    """Nor does what serves already."""
    with processes_of(tmp_path, served_by, "owner", "reader") as processes:
        processes.call("owner", keep, 1)
        processes.call("reader", nodes.join, KEEPER)
        for what, says in (("missing", "the state_dict has no"), ("shape", "has shape")):
            processes.call("owner", publish_bad, says, what)
            assert processes.call("reader", nodes.state).announced_serial == 1
        processes.call("owner", publish_bad, "NaN or infinite", "nan")
        # One more: the version with the same rows, which no reader had to let go for.
        assert processes.call("reader", nodes.state).announced_serial == 2


def fail(node: Node, number: int) -> None:
    fail_in(node)
    with pytest.raises(RendezvousError, match=r"no memory. The tables are drained already, and st"):
        publish(node.model, node.served.weights_of(number), version=str(number), drain=True)
    until(lambda: serving_state(node.model).drained_for == str(number))


@pytest.mark.parametrize("again", [drain, "publish"])
@pytest.mark.parametrize("served_by", SERVED)
def test_what_fails_in_a_drain_leaves_the_tables_drained(
    tmp_path: Path, served_by: str, again: Any
) -> None:
    with processes_of(tmp_path, served_by, "owner", "reader", "idle") as processes:
        processes.call("owner", keep, 1)
        processes.call_all(["reader", "idle"], nodes.join, KEEPER)
        processes.call("owner", fail, 2)
        processes.call_all(["owner", "reader"], refuse, 2)
        processes.call("owner", nodes.publish_all if again == "publish" else again, 3)
        follow(processes, "idle", 3)
        processes.call_all(["owner", "reader", "idle"], go_over, 3)


def publish_and_drain(node: Node, number: int) -> None:
    new = node.served.weights_of(number)
    made = publish(node.model, new, version=str(number), drain=True, deadline=DEADLINE)
    made.wait(DEADLINE)


def show_nothing(node: Node) -> None:
    """The weights of a drained model have no rows, and can't be published or written to."""
    until(lambda: serving_state(node.model).drained_for != "")
    rows = [
        getattr(value, "elem", value)
        for name, value in node.model.state_dict().items()
        if ("embedding_bags" in name or "embeddings" in name) and not hasattr(value, "local_shards")
    ]
    for value in node.model.state_dict().values():
        if hasattr(value, "local_shards"):
            rows += [shard.tensor for shard in value.local_shards()]
    assert rows and all(each.numel() == 0 for each in rows)
    for each in rows:
        each.zero_()  # which counts as a write, of nothing
    with pytest.raises(ValueError, match="show no rows, since the tables are drained"):
        publish(node.model, version="in place")


def publish_in_place(node: Node, number: int) -> None:
    node.served.write_in_place(node.model, number)
    with pytest.raises(ValueError, match="written in place would be lost"):
        publish(node.model, version=str(number), drain=True)
    with pytest.raises(ValueError, match="written to in place, which is lost"):
        publish_and_drain(node, number + 1)
    publish(node.model, version=str(number)).wait(DEADLINE)


@pytest.mark.parametrize("served_by", SERVED)
def test_a_rank_with_all_tables_drains_and_shows_the_new_ones(
    tmp_path: Path, served_by: str
) -> None:
    """And so do children that it has forked, and processes that have attached to it."""
    with started(tmp_path, 1, served_by) as processes:
        processes.call(0, nodes.state)
        fork(processes, 0, "child")
        processes.start("reader")
        processes.call("child", nodes.check, 1)
        processes.call("reader", nodes.join, 0)
        processes.call(0, fail, 2)
        processes.call_all([0, "child"], show_nothing_or_refuse)
        processes.call_all(["child", "reader"], refuse, 2)
        processes.call(0, publish_and_drain, 2)
        processes.call_all([0, "child", "reader"], go_over, 2)
        processes.call(0, publish_and_drain, 3)
        processes.call_all([0, "child", "reader"], go_over, 3)
        processes.call(0, publish_in_place, 4)
        processes.call_all([0, "child", "reader"], go_over, 4)


def show_nothing_or_refuse(node: Node) -> None:
    if node.name == 0:
        show_nothing(node)
    else:
        until(lambda: serving_state(node.model).drained_for != "")


def hold_weights(node: Node) -> None:
    """A tensor that somebody has taken from the weights shows the old tables."""
    held = [
        shard.tensor.detach()
        for value in node.model.state_dict().values()
        if hasattr(value, "local_shards")
        for shard in value.local_shards()
    ]
    assert held
    with pytest.raises(PeerTimeoutError, match=rf"processes {os.getpid()} \(this one\) have not"):
        publish(node.model, node.served.weights_of(2), version="2", drain=True, deadline=SOON)
    go_over(node, 1)
    del held
    publish_and_drain(node, 2)
    go_over(node, 2)


def test_tensors_of_the_weights_hold_them(tmp_path: Path) -> None:
    with started(tmp_path, 1) as processes:
        processes.call(0, hold_weights)


def refuse_to_drain(node: Node) -> None:
    new = node.served.weights_of(2)
    with pytest.raises(ValueError, match="2 ranks publish parts of them, each at its own time"):
        publish(node.model, new, version="2", drain=True)


def refuse_for_another(node: Node) -> None:
    new = node.served.weights_of(2)
    with pytest.raises(ValueError, match="tables are drained where they are owned: attach"):
        publish(node.model, new, version="2", owner=0, drain=True)
    with pytest.raises(ValueError, match="name of tables that are drained"):
        publish(node.model, new, version="(drained)")


def test_who_cant_drain_is_told_why(tmp_path: Path) -> None:
    with started(tmp_path, 2) as processes:
        processes.call(0, refuse_to_drain)
        processes.start("reader")
        processes.call("reader", nodes.join, 0)
        processes.call("reader", refuse_for_another)
        processes.call_all([0, 1, "reader"], nodes.check, 1)


def test_a_reader_publishes_for_an_owner_that_died_in_a_drain(tmp_path: Path) -> None:
    with started(tmp_path, 1) as processes:
        processes.start("reader")
        processes.call("reader", nodes.join, 0)
        processes.call(0, fail, 2)
        processes.kill(0)
        processes.call("reader", refuse_of_the_dead)
        processes.call("reader", nodes.publish_all, 3, 0)
        processes.call("reader", go_over, 3)

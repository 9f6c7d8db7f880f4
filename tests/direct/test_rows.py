"""Rows are refreshed in place, and every batch is of exactly one version."""

import gc
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from tests.direct import nodes, served
from tests.direct.at_every_line import Place, places_of, some_of, strike
from tests.direct.nodes import DEADLINE, Node, NodeFailedError, until
from tests.direct.row_versions import go_on, is_whole
from tests.direct.served import number_of
from tests.direct.test_drain import go_over as go_over_drained
from tests.direct.test_keeper import KEEPER, keep, kept, processes_of, stopped
from tests.direct.test_keeper_deaths import give_up, walk
from tests.distributed import models
from tests.tiers import slow_but
from torchrec_bls import _native, keeper, publish_rows, serving_state, version_of
from torchrec_bls.direct.process import this_process
from torchrec_bls.direct.serving.publisher import Publisher
from torchrec_bls.direct.serving.served_model import ServedModel
from torchrec_bls.errors import BLSError, PeerTimeoutError

REFRESHED = "tests.direct.refreshed"
BOTH = [REFRESHED, "tests.quant.refreshed"]
TABLE = "bags.embedding_bags.t0.weight"


def go_on_until(node: Node, first: int, last: int, pause: float = 0.0) -> None:
    for number in range(first, last + 1):
        go_on(node, number)
        time.sleep(pause)


def check_until(node: Node, end: str, least: int) -> int:
    """Looks so many batches up, and more until a file exists; returns the version of the last."""
    number = 0
    while number < least or not Path(node.path_of(end)).exists():
        served.check(node.model, node.batches, node.expected, number)
        number += 1
    return number_of(version_of(node.model))


@pytest.mark.parametrize("served_by", BOTH)
def test_every_batch_is_of_the_version_that_it_names(tmp_path: Path, served_by: str) -> None:
    readers = ["first", "second", "third"]
    with processes_of(tmp_path, served_by, "keeper", *readers) as processes:
        processes.call("keeper", keep, 1)
        processes.call_all(readers, nodes.join, KEEPER)
        for name in readers:
            processes.begin(name, check_until, "end", 1500)
        processes.call("keeper", go_on_until, 2, 68, 0.02)
        (tmp_path / "end").touch()
        for name in readers:
            assert processes.end(name) > 1
        # Whole versions came in between, so that copies were made anew.
        processes.call("keeper", nodes.go_over, 68)
        processes.call_all(readers, nodes.go_over, 68)
        until(lambda: processes.call("first", nodes.state).readers_behind == {})


def test_a_reader_without_batches_keeps_nobody_waiting(tmp_path: Path) -> None:
    with processes_of(tmp_path, REFRESHED, "keeper", "idle") as processes:
        processes.call("keeper", keep, 1)
        processes.call("idle", nodes.join, KEEPER)
        processes.call("keeper", go_on_until, 2, 6)
        processes.call("idle", nodes.check)
        processes.call("idle", nodes.go_over, 6)
        processes.call("idle", rest)
        with stopped(processes, "idle"):
            processes.call("keeper", go_on_until, 7, 9)
        processes.call("idle", nodes.check, 9)


def rest(node: Node) -> None:
    """Waits until this process pins nothing, since it has called no model for a while."""
    pins = ServedModel.of(node.model)._pins
    until(lambda: pins.held[0] == 0)


def publish_one_row(node: Node, number: int) -> None:
    delta = {TABLE: (torch.tensor([3]), torch.full((1, 8), float(number)))}
    kept(node).publish_rows(delta, version=str(number), base=str(number - 1), deadline=DEADLINE)


def windows_of(node: Node, number: int) -> list[int]:
    """Looks batches up until a version serves; returns the windows of both sides once they are
    mapped, by their identities."""

    def serves() -> bool:
        with torch.no_grad():
            node.model(node.batches[0])
        return version_of(node.model) == str(number)

    until(serves)
    [bags, *_] = ServedModel.of(node.model).reads
    until(lambda: len(bags.tables.windows.all) == 2)
    assert bags.generation.window in bags.tables.windows.all
    return sorted(map(id, bags.tables.windows.all))


def test_the_other_side_is_mapped_before_a_version_is_there(tmp_path: Path) -> None:
    with processes_of(tmp_path, REFRESHED, "keeper", "reader") as processes:
        processes.call("keeper", keep, 1)
        processes.call("reader", nodes.join, KEEPER)
        processes.call("keeper", publish_one_row, 2)
        mapped = processes.call("reader", windows_of, 2)
        for number in (3, 4):
            processes.call("keeper", publish_one_row, number)
            assert processes.call("reader", windows_of, number) == mapped


def stay_inside(node: Node) -> None:
    """Stays in a forward for good."""

    def stay(*_: Any) -> None:
        Path(node.path_of("inside")).touch()
        time.sleep(DEADLINE)

    node.model.dense.register_forward_pre_hook(stay)
    nodes.check(node)


def refuse(node: Node, number: int, reader: int) -> None:
    """Fails to publish, since a reader stays in a batch of an older version."""
    with pytest.raises(PeerTimeoutError, match=rf"processes {reader} still run a batch"):
        go_on(node, number, deadline=0.3)
    nodes.check(node, number - 1)


def test_a_reader_inside_a_batch_is_waited_for_unless_it_is_dead(tmp_path: Path) -> None:
    with processes_of(tmp_path, REFRESHED, "keeper", "stuck", "reader") as processes:
        processes.call("keeper", keep, 1)
        processes.call("stuck", nodes.join, KEEPER)
        processes.call("reader", nodes.join, KEEPER)
        processes.call("keeper", go_on, 2)
        processes.call("stuck", nodes.go_over, 2)
        stuck = processes.call("stuck", nodes.pid_of)
        processes.begin("stuck", stay_inside)
        until(Path(tmp_path / "inside").exists)
        processes.call("keeper", go_on, 3)  # on the other side
        processes.call("keeper", refuse, 4, stuck)
        processes.call("reader", nodes.go_over, 3)
        processes.call("keeper", refuse, 4, stuck)
        os.kill(stuck, signal.SIGKILL)
        processes.call("keeper", go_on_until, 4, 6)
        processes.call("reader", nodes.go_over, 6)


@contextmanager
def writes_made_by(act: Callable[[Callable[[int], None], int], None]) -> Iterator[None]:
    """Has a function make all writes to the copies of tables. It gets a function that writes the
    first of the rows, as many as that one gets, and how many there are."""

    def write_rows(pieces: Any, ids: torch.Tensor, rows: torch.Tensor) -> None:
        act(lambda count: written(pieces, ids[:count], rows[:count]), len(ids))

    def copy_rows(sources: Any, pieces: Any, row_bytes: int, ids: torch.Tensor) -> None:
        act(lambda count: copied(sources, pieces, row_bytes, ids[:count]), len(ids))

    written, copied = _native.write_rows, _native.copy_rows
    _native.write_rows, _native.copy_rows = write_rows, copy_rows
    try:
        yield
    finally:
        _native.write_rows, _native.copy_rows = written, copied


def die_while_writing(node: Node, number: int, writes: int) -> None:
    """Writes some rows of a version, and half of the next ones, and is killed."""
    left = writes

    def die(write: Callable[[int], None], rows: int) -> None:
        nonlocal left
        if left == 0 and rows > 1:
            write(rows // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        left = max(0, left - 1)
        write(rows)

    with writes_made_by(die):
        go_on(node, number)


@pytest.mark.parametrize("served_by", BOTH)
@pytest.mark.parametrize("writes", [0, 3])
def test_a_keeper_that_is_killed_while_it_writes_costs_its_readers_nothing(
    tmp_path: Path, writes: int, served_by: str
) -> None:
    with processes_of(tmp_path, served_by, "keeper", "reader", "successor") as processes:
        processes.call("keeper", keep, 1)
        processes.call("reader", nodes.join, KEEPER)
        processes.call("keeper", go_on_until, 2, 5)
        processes.call("reader", nodes.go_over, 5)
        pid = processes.call("keeper", nodes.pid_of)
        processes.begin("keeper", die_while_writing, 6, writes)
        until(lambda: nodes.state_of(pid) in "ZX")
        processes.call("reader", nodes.check, 5)
        assert processes.call("successor", keep, None)
        processes.call("successor", nodes.check, 5)
        # It can't write to the copies that it has found.
        processes.call("successor", go_on_until, 6, 8)
        processes.call("reader", nodes.go_over, 8)
        processes.call("successor", go_on_until, 9, 12)
        processes.call("reader", nodes.go_over, 12)


CASES = [(REFRESHED, 800, 3), (REFRESHED, 10_000, 8), ("tests.quant.refreshed", 10_000, 8)]


@pytest.mark.parametrize(("served_by", "batches", "keepers"), slow_but(CASES[:1], CASES))
def test_readers_lose_no_batch_while_keepers_and_other_readers_die(
    tmp_path: Path, served_by: str, batches: int, keepers: int
) -> None:
    readers = [f"reader {number}" for number in range(4)]
    mortal = [f"keeper {number}" for number in range(keepers)]
    victims = [f"victim {number}" for number in range(keepers - 1)]
    names = [*mortal, *readers, *victims]
    rng = random.Random(7)
    with processes_of(tmp_path, served_by, *names, deadline=1200.0) as processes:
        processes.call(mortal[0], keep, 1)
        processes.call_all(readers, nodes.join, KEEPER)
        for name in readers:
            processes.begin(name, check_until, "end", batches)
        number = 1
        for keeper_now, victim, successor in zip(mortal, victims, mortal[1:], strict=False):
            processes.call(victim, nodes.join, KEEPER)
            pids = [processes.call(name, nodes.pid_of) for name in (keeper_now, victim)]
            processes.begin(victim, nodes.check_many, 1_000_000, victim)
            for _ in range(12):
                number += 1
                processes.call(keeper_now, go_on, number)
            os.kill(pids[1], signal.SIGKILL)
            number += 1
            processes.call(keeper_now, go_on, number)
            processes.begin(keeper_now, go_on, number + 1)
            time.sleep(rng.random() * 0.03)
            os.kill(pids[0], signal.SIGKILL)
            until(lambda pid=pids[0]: nodes.state_of(pid) in "ZX")
            assert processes.call(successor, keep, None)
            number = number_of(processes.call(successor, nodes.state).announced)
        (tmp_path / "end").touch()
        while not all(processes.has_answered(name) for name in readers):
            number += 1
            processes.call(mortal[-1], go_on, number)
            time.sleep(0.1)  # what a version gives takes readers longer to find than to look up
        for name in readers:
            assert processes.end(name) > 1
        processes.call_all(readers, nodes.go_over, number)


def pairs(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(shape[0]), torch.ones(shape)


BAD = {
    "unknown": ({"bags.embedding_bags.t9.weight": pairs(1, 8)}, r"no tables \['bags"),
    "no pair": ({TABLE: torch.ones(1, 8)}, r"must be a pair \(ids, rows\)"),
    "dtype": ({TABLE: (torch.arange(1), torch.ones(1, 8).double())}, "must be torch.float32"),
    "dimension": ({TABLE: pairs(1, 16)}, r"must be torch.float32 \[1, 8\]"),
    "count": ({TABLE: (torch.arange(2), torch.ones(1, 8))}, r"for 2 ids must be"),
    "float ids": ({TABLE: (torch.ones(1), torch.ones(1, 8))}, "must be int64 or int32"),
    "too large": ({TABLE: (torch.tensor([0, 41]), torch.ones(2, 8))}, "id 41 is no row"),
    "negative": ({TABLE: (torch.tensor([0, -1]), torch.ones(2, 8))}, "id -1 is no row"),
    "NaN": ({TABLE: (torch.tensor([3]), torch.full((1, 8), torch.nan))}, "in row 3 for example"),
    "infinite": ({TABLE: (torch.tensor([3]), torch.full((1, 8), torch.inf))}, "in row 3"),
    "sparse": ({TABLE: (torch.arange(1), torch.ones(1, 8).to_sparse())}, "layout"),
}
BAD_DENSE = {
    "unknown": ({"dense.scale": torch.ones(1)}, r"no dense weights \['dense.scale'\]"),
    "table": ({TABLE: torch.ones(41, 8)}, r"no dense weights \['bags"),
    "shape": ({"dense.bias": torch.ones(2)}, r"'dense.bias' has shape \[2\]"),
    "dtype": ({"dense.bias": torch.ones(3).double()}, "and torch.float64, but the model's"),
    "no tensor": ({"dense.bias": [1.0, 2.0, 3.0]}, "'dense.bias' is a list"),
    "one of two": ({"dense.weight": torch.ones(3, 1), "dense.bias": None}, "is a NoneType"),
}


def refuse_bad(node: Node) -> None:
    made = kept(node)
    page = made.model.bags.direct_reads.tables.page
    for what, (rows, text) in BAD.items():
        with pytest.raises(ValueError, match=text):
            made.publish_rows(rows, version="9", base="1")
        assert [page.serial_on(side) for side in (0, 1)] == [0, 0], what
    for what, (dense, text) in BAD_DENSE.items():
        with pytest.raises(ValueError, match=text):
            made.publish_rows({TABLE: pairs(1, 8)}, version="9", base="1", dense=dense)
        assert [page.serial_on(side) for side in (0, 1)] == [0, 0], what
    for version, base, text in [
        ("9", "2", "belong on version '2', but '1' serves"),
        ("1", "1", "serves already"),
        ("1", "0", "belong on version '0'"),
        ("", "1", "printable text"),
    ]:
        with pytest.raises(ValueError, match=text):
            made.publish_rows({}, version=version, base=base)
    nodes.check(node, 1)
    assert serving_state(node.model).failed_publishes == len(BAD) + len(BAD_DENSE) + 3
    go_on(node, 2)
    nodes.check(node, 2)


def refuse_reader(node: Node) -> None:
    with pytest.raises(ValueError, match="reads the tables of others and publishes none"):
        publish_rows(node.model, {}, version="9", base="2")


def test_what_can_not_be_published_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with processes_of(tmp_path, REFRESHED, "keeper", "reader") as processes:
        processes.call("keeper", keep, 1)
        processes.call("keeper", refuse_bad)
        processes.call("reader", nodes.join, KEEPER)
        processes.call("reader", refuse_reader)


def refresh_dense_alone(node: Node) -> None:
    made, ids = kept(node), node.batches[0]
    with torch.no_grad():
        before = made.model(ids)
        for number, version in enumerate(("a", "b", "c")):
            base, bias = made.version, torch.full((3,), float(number))
            made.publish_rows({}, version=version, base=base, dense={"dense.bias": bias})
            bias.fill_(100.0)  # the caller's, who may go on with it
            after = made.model(ids)
            weight = node.served.weights_of(1)["dense.weight"]
            assert torch.equal(after.pop("dense"), weight.T + number)
            models.assert_same_bits(after, {key: before[key] for key in after})
    # The one before is still whole for the next rows.
    made.publish_rows({TABLE: pairs(1, 8)}, version="d", base="c")
    assert made.model.dense.bias.tolist() == [2.0, 2.0, 2.0]


def test_dense_weights_alone_make_a_version(tmp_path: Path) -> None:
    with processes_of(tmp_path, REFRESHED, "keeper") as processes:
        processes.call("keeper", keep, 1)
        processes.call("keeper", refresh_dense_alone)


def go_on_after_a_whole_version_that_failed(node: Node) -> None:
    announce = Publisher.announce

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    Publisher.announce = fail  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        kept(node).publish(node.served.weights_of(7), version="2")
    Publisher.announce = announce  # type: ignore[method-assign]
    go_on(node, 2)  # of the same name and number
    nodes.check(node, 2)


def test_dense_weights_of_a_version_that_failed_are_in_no_other(tmp_path: Path) -> None:
    with processes_of(tmp_path, REFRESHED, "keeper", "reader") as processes:
        processes.call("keeper", keep, 1)
        processes.call("reader", nodes.join, KEEPER)
        processes.call("keeper", go_on_after_a_whole_version_that_failed)
        processes.call("reader", nodes.go_over, 2)


def call_a_module(node: Node) -> None:
    """Its rows are written over, and nobody has told it."""
    batch = node.batches[0]
    with torch.no_grad():
        node.model.bags(batch)
        # The pin outlives the forward until the thread that follows lets go of it.
        pins = ServedModel.of(node.model)._pins
        until(lambda: pins.held[0] == 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        reads = node.model.bags.direct_reads
        with pytest.raises(BLSError, match="call the model"):
            reads.output(node.model.bags.input_check.check(batch))
    nodes.check(node)


def test_a_lookup_past_the_forward_of_the_model_sees_no_other_version(tmp_path: Path) -> None:
    with processes_of(tmp_path, REFRESHED, "keeper", "reader") as processes:
        processes.call("keeper", keep, 1)
        processes.call("keeper", go_on, 2)
        processes.call("reader", nodes.join, KEEPER)
        pid = processes.call("reader", nodes.pid_of)
        processes.begin("reader", call_a_module)
        until(lambda: nodes.state_of(pid) == "T")
        processes.call("keeper", go_on_until, 3, 4)
        os.kill(pid, signal.SIGCONT)
        processes.end("reader")


def fail_while_writing(node: Node, first: int, last: int) -> None:
    """Publishes versions, each after attempts that have ended while they were written."""

    def failing(writes: int) -> Callable[[Callable[[int], None], int], None]:
        left = writes

        def write_or_fail(write: Callable[[int], None], rows: int) -> None:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            write(rows)

        return write_or_fail

    for number in range(first, last + 1):
        for writes in (number % 7, 0, 4) if not is_whole(number) else ():
            # Rows of the failed attempt are others than those of the next one.
            others, dense = (
                of(1000 * writes + number) for of in (node.served.delta_of, node.served.dense_of)
            )
            with writes_made_by(failing(writes)), pytest.raises(KeyboardInterrupt):
                kept(node).publish_rows(others, version="failed", base=str(number - 1), dense=dense)
            nodes.check(node, number - 1)
        go_on(node, number)
        nodes.check(node, number)


@pytest.mark.parametrize("served_by", BOTH)
def test_rows_of_an_attempt_that_failed_are_in_no_later_version(
    tmp_path: Path, served_by: str
) -> None:
    with processes_of(tmp_path, served_by, "keeper", "reader") as processes:
        processes.call("keeper", keep, 1)
        processes.call("reader", nodes.join, KEEPER)
        processes.begin("reader", nodes.check_many, 300, "ready")
        processes.call("keeper", fail_while_writing, 2, 24)
        processes.end("reader")
        processes.call("reader", nodes.go_over, 24)


def check_in_threads(node: Node, threads: int, times: int) -> None:
    """Looks batches up in several threads, each of the version that its own forward has."""
    sys.setswitchinterval(1e-5)
    seen = threading.local()

    def note(*_: Any) -> None:
        seen.version = node.model.rows.version

    node.model.dense.register_forward_hook(note)

    def call(first: int) -> None:
        for number in range(first, first + times):
            batch = number % len(node.batches)
            with torch.no_grad():
                output = node.model(node.batches[batch])
            expected = node.expected.of(number_of(seen.version), batch)
            models.assert_same_bits(output, expected)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(call, range(threads)))


@pytest.mark.parametrize("served_by", BOTH)
def test_threads_of_a_reader_see_one_version_each(tmp_path: Path, served_by: str) -> None:
    with processes_of(tmp_path, served_by, "keeper", "reader") as processes:
        processes.call("keeper", keep, 1)
        processes.call("reader", nodes.join, KEEPER)
        processes.begin("reader", check_in_threads, 4, 400)
        processes.call("keeper", go_on_until, 2, 38, 0.01)
        processes.end("reader")
        processes.call("reader", nodes.go_over, 38)


# Rows of 96 bytes don't divide pages, and some tables are not worth a piece.
ROWS = {"a": 3000, "b": 20, "c": 2000, "d": 30, "e": 1001}
COLUMNS = 24


class Large(nn.Module):
    """Gives all rows of its tables."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=name,
                    num_embeddings=rows,
                    embedding_dim=COLUMNS,
                    feature_names=[name],
                )
                for name, rows in ROWS.items()
            ]
        )

    def forward(self) -> dict[str, torch.Tensor]:
        features = KeyedJaggedTensor(
            keys=list(ROWS),
            values=torch.cat([torch.arange(rows) for rows in ROWS.values()]),
            lengths=torch.tensor(list(ROWS.values())),
        )
        return {name: rows.values() for name, rows in self.rows(features).items()}


def refresh_large(node: Node, deltas: int) -> None:
    weights = {name: torch.randn_like(value) for name, value in Large().state_dict().items()}
    made = keeper(Large, weights, node.path_of("large"), version="0")
    pieces = made.model.rows.direct_reads.tables.cuts[0].pieces
    assert len(pieces) > 3 and any(len(piece.spans) > 1 for piece in pieces)
    torch.manual_seed(1)
    for number in range(1, deltas + 1):
        delta = {}
        for name in weights:
            rows, columns = weights[name].shape
            if torch.rand(()) < 0.6:
                ids = torch.randperm(rows)[: int(torch.rand(()) ** 2 * rows)]
                delta[name] = ids.int(), torch.randn(len(ids), columns)
                weights[name][ids] = delta[name][1]
        made.publish_rows(delta, version=str(number), base=str(number - 1))
        with torch.no_grad():
            found = made.model()
        for name, value in weights.items():
            assert torch.equal(found[name.split(".")[-2]], value), (number, name)
    made.close()


def test_rows_that_lie_in_two_pieces_are_whole(tmp_path: Path) -> None:
    with processes_of(tmp_path, REFRESHED, "keeper") as processes:
        processes.call("keeper", refresh_large, 40)


def strike_rows(node: Node, step: int) -> int:
    """Strikes at places of `publish_rows`. Each time one version serves, and the next one comes."""
    # What a keeper does more is what any process does that has got a version.
    versions = kept(node)._served.publisher.versions
    shown = 2

    def publish_next() -> None:
        number = shown + 1
        delta, dense = node.served.delta_of(number), node.served.dense_of(number)
        publish_rows(node.model, delta, version=str(number), base=str(shown), dense=dense)

    def afterwards() -> None:
        nonlocal shown
        serves = number_of(versions.serving[1])
        assert serves in (shown, shown + 1)
        nodes.go_over(node, serves)
        shown = serves
        while True:
            shown += 1
            go_on(node, shown)
            nodes.check(node, shown)
            if not is_whole(shown + 1):
                return

    go_on(node, 2)
    places = places_of(publish_next)
    afterwards()
    for place, error in zip(some_of(places, step), cycle([KeyboardInterrupt, OSError])):
        strike(publish_next, place, error)
        try:
            afterwards()
        except BaseException as failure:
            name = f"{Path(place[0]).name}:{place[1]}"
            raise AssertionError(f"after {error.__name__} at {name}: {failure!r}") from failure
    return len(places)


def test_an_exception_at_any_line_leaves_one_version(tmp_path: Path) -> None:
    with processes_of(tmp_path, REFRESHED, "keeper") as processes:
        processes.call("keeper", keep, 1)
        assert processes.call("keeper", strike_rows, 4) > 100


def walk_in_child(node: Node, number: int, kill_at: Place | None) -> tuple[int, list[Place]]:
    """Returns the signal that has ended a child which keeps the tables and publishes rows, 0 if
    none has, and its places."""
    told = Path(node.path_of("places"))
    pid = os.fork()
    if pid == 0:
        try:
            made = keeper(node.served.bare_model, {}, node.path_of(KEEPER))
            node.offers.append(made)  # type: ignore[arg-type]
            # The copies are there, and the next one is written to them.
            go_on(node, number)
            told.write_bytes(pickle.dumps(walk(lambda: go_on(node, number + 1), kill_at)))
            made.close()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status), []
    assert os.WEXITSTATUS(status) == 0
    return 0, pickle.loads(told.read_bytes())


def take_over(node: Node) -> int:
    """Publishes versions until the next two have rows alone; returns the last one. One that nobody
    had mapped went with its keeper."""
    assert keep(node, None)
    last = number_of(kept(node).version) + 1
    go_on(node, last)
    while is_whole(last + 1) or is_whole(last + 2):
        last += 1
        go_on(node, last)
    give_up(node)
    return last


def test_a_keeper_is_killed_at_some_lines(tmp_path: Path) -> None:
    names = "first", "nursery", "successor", "reader"
    with processes_of(tmp_path, REFRESHED, *names, deadline=1200.0) as processes:
        processes.call("first", keep, 1)
        processes.call("reader", nodes.join, KEEPER)
        processes.call("first", give_up)
        _, places = processes.call("nursery", walk_in_child, 2, None)
        assert len(places) > 100
        processes.call("reader", nodes.go_over, 3)
        shown, killed = processes.call("successor", take_over), 0
        for place in some_of(places, 17):
            what = f"{Path(place[0]).name}:{place[1]}"
            processes.call("reader", nodes.go_over, shown)
            ended_by, _ = processes.call("nursery", walk_in_child, shown + 1, place)
            # Not each delta makes copies, or finds one that its keeper has not announced.
            assert ended_by in (signal.SIGKILL, 0), what
            killed += ended_by == signal.SIGKILL
            seen = processes.call("reader", nodes.check)
            assert shown <= seen <= shown + 2, what
            shown = processes.call("successor", take_over)
        assert killed > 0.8 * len(some_of(places, 17))


def take_slots(node: Node) -> None:
    """Takes all slots that are left."""
    page, own = node.model.bags.direct_reads.tables.page, this_process().identity
    take = _native.ReaderSlot.take
    node.slots = list(iter(lambda: take(page, own, 1, lambda _: True), None))  # type: ignore[attr-defined]


def give_a_slot_back(node: Node) -> None:
    node.slots.pop()  # type: ignore[attr-defined]


def test_a_reader_without_a_slot_is_refused_until_it_has_one(tmp_path: Path) -> None:
    with processes_of(tmp_path, REFRESHED, "keeper", "reader") as processes:
        processes.call("keeper", keep, 1)
        processes.call("keeper", take_slots)
        processes.call("reader", nodes.join, KEEPER)  # nothing is refreshed yet
        processes.call("keeper", go_on_until, 2, 3)
        with pytest.raises(NodeFailedError, match="it is not among the readers"):
            processes.call("reader", nodes.go_over, 3)
        processes.call("keeper", give_a_slot_back)
        time.sleep(4.0)  # it tries again every 2 s
        processes.call("reader", nodes.go_over, 3)


def mapped_files(_: Node) -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:torchrec_bls")


def drain(node: Node, number: int) -> None:
    kept(node).publish(
        node.served.weights_of(number), version=str(number), drain=True, deadline=DEADLINE
    )


def test_a_whole_version_frees_both_copies(tmp_path: Path) -> None:
    names = ["keeper", "reader"]
    with processes_of(tmp_path, REFRESHED, *names) as processes:
        processes.call("keeper", keep, 1)
        processes.call("reader", nodes.join, KEEPER)
        processes.call("keeper", go_on, 10)
        processes.call("reader", nodes.go_over, 10)
        until(lambda: processes.call("reader", nodes.state).readers_behind == {})
        before = processes.call_all(names, mapped_files)
        processes.call("keeper", go_on_until, 11, 19)
        processes.call("reader", nodes.go_over, 19)
        assert processes.call("keeper", mapped_files) > before[0]
        processes.call("keeper", go_on, 20)
        processes.call("reader", nodes.go_over, 20)
        until(lambda: processes.call_all(names, mapped_files) == before)
        processes.call("keeper", go_on_until, 21, 29)
        processes.call("reader", nodes.go_over, 29)
        processes.call("keeper", drain, 30)
        processes.call("reader", go_over_drained, 30)
        until(lambda: processes.call_all(names, mapped_files) == before)
        processes.call("keeper", go_on_until, 31, 33)
        processes.call("reader", nodes.go_over, 33)

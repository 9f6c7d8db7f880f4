"""A keeper owns all tables. Its death costs readers nothing, and its successor loads nothing."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

from tests.direct import nodes
from tests.direct.forked import fork
from tests.direct.nodes import DEADLINE, FLOAT, Node, NodeFailedError, Nodes
from torchrec_bls import keeper
from torchrec_bls.direct.keeping import keeper as keeping
from torchrec_bls.direct.keeping.keeper import Keeper
from torchrec_bls.direct.serving.served_model import ServedModel
from torchrec_bls.direct.serving.versions import Versions

SERVED = [FLOAT, "tests.quant.served"]
KEEPER = "keeper"


def keep(node: Node, number: int | None) -> bool:
    """Keeps the weights of a number, or those that readers have. Returns whether these had any."""
    weights = Unread() if number is None else node.served.weights_of(number)
    made = keeper(node.served.bare_model, weights, node.path_of(KEEPER), version=str(number))
    node.offers.append(made)  # type: ignore[arg-type]
    node.model = made.model
    return made.took_over


class Unread(dict[str, Any]):
    """Weights that nobody may read."""

    def __getitem__(self, name: str) -> Any:
        raise AssertionError(f"{name} is read")


def kept(node: Node) -> Keeper:
    found = node.offers[-1]
    assert isinstance(found, Keeper)
    return found


def publish(node: Node, number: int) -> None:
    kept(node).publish(node.served.weights_of(number), version=str(number), deadline=DEADLINE)
    assert kept(node).version == str(number)


@contextmanager
def processes_of(
    folder: Path, served_by: str, *names: str, deadline: float = 3 * DEADLINE
) -> Iterator[Nodes]:
    processes = Nodes(folder, served_by, deadline)
    try:
        for name in names:
            processes.start(name)
        yield processes
    finally:
        processes.close()


@contextmanager
def stopped(processes: Nodes, name: str) -> Iterator[int]:
    """Stops a process for the time of this context. Yields its number."""
    pid = processes.call(name, nodes.pid_of)
    os.kill(pid, signal.SIGSTOP)
    try:
        nodes.until(lambda: nodes.state_of(pid) == "T")
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("served_by", SERVED)
def test_a_successor_takes_the_tables_over_from_a_reader(tmp_path: Path, served_by: str) -> None:
    with processes_of(tmp_path, served_by, "first", "second", "reader", "late") as processes:
        assert not processes.call("first", keep, 1)
        processes.call("first", nodes.check, 1)
        processes.call("reader", nodes.join, KEEPER)
        processes.call("first", publish, 2)
        processes.call("reader", nodes.go_over, 2)
        with pytest.raises(NodeFailedError, match=r"process \d+ keeps tables at .*keeper: end it"):
            processes.call("second", keep, None)
        processes.kill("first")
        processes.call("reader", nodes.check, 2)
        assert processes.call("reader", nodes.state).owners_gone == (0,)
        assert processes.call("second", keep, None)
        processes.call("second", nodes.check, 2)
        assert processes.call("reader", nodes.state).owners_gone == ()
        processes.call("late", nodes.join, KEEPER)
        processes.call("second", publish, 3)
        processes.call_all(["reader", "late"], nodes.go_over, 3)


@pytest.mark.parametrize("served_by", SERVED)
def test_without_readers_the_checkpoint_is_loaded(tmp_path: Path, served_by: str) -> None:
    with processes_of(tmp_path, served_by, "first", "second", "reader") as processes:
        processes.call("first", keep, 1)
        processes.kill("first")
        assert not processes.call("second", keep, 2)
        processes.call("reader", nodes.join, KEEPER)
        processes.call("reader", nodes.check, 2)


def close(node: Node) -> None:
    kept(node).close()
    with pytest.raises(ValueError, match="is closed"):
        kept(node).publish({})
    nodes.check(node)


def test_a_keeper_that_closes_gives_its_place_to_another_process(tmp_path: Path) -> None:
    """It goes on as a reader, and its successor takes the tables over from it."""
    with processes_of(tmp_path, FLOAT, "first", "second") as processes:
        processes.call("first", keep, 1)
        processes.call("first", close)
        assert processes.call("second", keep, None)
        processes.call("second", publish, 2)
        processes.call("first", nodes.go_over, 2)


def close_in_child(node: Node) -> None:
    kept(node).close()
    nodes.check(node, 1)
    with pytest.raises(ValueError, match="this process was forked from process"):
        kept(node).publish(node.served.weights_of(2), version="2")


def test_a_child_that_a_keeper_has_forked_is_a_reader(tmp_path: Path) -> None:
    """It keeps neither the lock nor the socket, and the successor takes the tables over from it."""
    with processes_of(tmp_path, FLOAT, "first", "second") as processes:
        processes.call("first", keep, 1)
        fork(processes, "first", "child")
        processes.call("child", close_in_child)
        with pytest.raises(NodeFailedError, match=r"process \d+ keeps tables at"):
            processes.call("second", keep, None)
        processes.kill("first")
        assert processes.call("second", keep, None)
        processes.call("second", publish, 3)
        processes.call("child", nodes.go_over, 3)


def test_a_stopped_keeper_keeps_its_place(tmp_path: Path) -> None:
    with processes_of(tmp_path, FLOAT, "first", "second", "reader") as processes:
        processes.call("first", keep, 1)
        processes.call("reader", nodes.join, KEEPER)
        with stopped(processes, "first") as pid:
            processes.call("reader", nodes.check, 1)
            with pytest.raises(NodeFailedError, match=rf"process {pid} keeps.* is stopped \(kill"):
                processes.call("second", keep, None)
        processes.call("first", publish, 2)
        processes.call("reader", nodes.go_over, 2)


@pytest.mark.parametrize("served_by", SERVED)
def test_a_successor_finds_versions_before_the_last_one(tmp_path: Path, served_by: str) -> None:
    """The keeper had served two more, and no reader had mapped these."""
    with processes_of(tmp_path, served_by, "first", "second", "reader") as processes:
        processes.call("first", keep, 1)
        processes.call("reader", nodes.join, KEEPER)
        with stopped(processes, "reader"):
            processes.call("first", publish, 2)
            processes.call("first", publish, 3)
            processes.kill("first")
            assert processes.call("second", keep, None)
            processes.call("second", nodes.check, 1)
        processes.call("reader", nodes.check, 1)
        processes.call("second", publish, 4)
        processes.call("reader", nodes.go_over, 4)


def test_a_stopped_reader_holds_the_old_version(tmp_path: Path) -> None:
    """It holds nobody up, hands the tables of its version over, and follows when it goes on."""
    with processes_of(tmp_path, FLOAT, "first", "second", "reader") as processes:
        processes.call("first", keep, 1)
        processes.call("reader", nodes.join, KEEPER)
        with stopped(processes, "reader"):
            ended = processes.call("first", nodes.pid_of)
            processes.begin("first", lose, 2)
            nodes.until(lambda: nodes.state_of(ended) in "ZX")
            assert processes.call("second", keep, None)
            processes.call("second", nodes.check, 1)
            processes.call("second", publish, 3)
        processes.call("reader", nodes.go_over, 3)


def lose(node: Node, number: int) -> None:
    """Is killed when a version is announced, and no reader has mapped it."""

    def announce(versions: Versions, *args: Any) -> None:
        original(versions, *args)
        os.kill(os.getpid(), signal.SIGKILL)

    original = Versions.announce
    Versions.announce = announce  # type: ignore[method-assign]
    publish(node, number)


def hold_back(node: Node) -> None:
    """Makes this reader map nothing new."""
    ServedModel.of(node.model).publisher.follower.stop()


def forget(node: Node) -> None:
    """Makes a keeper on this node tell its successor of its last version alone."""
    keeping._REMEMBERED = 1


def test_a_version_that_went_with_its_keeper(tmp_path: Path) -> None:
    """The one before is taken over, and goes on being held."""
    with processes_of(tmp_path, FLOAT, "first", "second", "third", "reader") as processes:
        processes.call("first", keep, 1)
        processes.call("reader", nodes.join, KEEPER)
        processes.call("reader", hold_back)
        pid = processes.call("first", nodes.pid_of)
        processes.begin("first", lose, 2)
        nodes.until(lambda: nodes.state_of(pid) in "ZX")
        processes.call("second", forget)
        assert processes.call("second", keep, None)
        processes.call_all(["reader", "second"], nodes.check, 1)
        processes.call("second", publish, 2)
        processes.call("second", nodes.check, 2)
        processes.kill("second")
        # The reader has version 1 alone, of which nothing tells: its pages are filled anew.
        assert not processes.call("third", keep, 3)
        processes.call("third", nodes.check, 3)
        processes.call("reader", follow)
        processes.call("reader", nodes.go_over, 3)


def follow(node: Node) -> None:
    follower = ServedModel.of(node.model).publisher.follower
    follower._process = None
    follower.start()


def close_and_die(node: Node, begun: str) -> None:
    Path(node.path_of(begun)).touch()
    kept(node).close()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_keeper_that_closes_hands_its_last_version_on(tmp_path: Path) -> None:
    """A reader had mapped nothing of it yet."""
    with processes_of(tmp_path, FLOAT, "first", "second", "reader") as processes:
        processes.call("first", keep, 1)
        processes.call("reader", nodes.join, KEEPER)
        processes.call("reader", hold_back)
        processes.call("first", publish, 2)
        processes.begin("first", close_and_die, "begun")
        nodes.until((tmp_path / "begun").exists)
        processes.call("reader", follow)
        processes.call("reader", nodes.go_over, 2)
        assert processes.call("second", keep, None)
        processes.call("second", nodes.check, 2)


def close_without_waiting(node: Node) -> list[str]:
    keeping._HANDING_ON = 0.0
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeping._log, "warning", lambda text, *args: said.append(text % args))
        kept(node).close()
    return said


def test_a_keeper_that_closes_says_what_nobody_has(tmp_path: Path) -> None:
    with processes_of(tmp_path, FLOAT, "first", "reader") as processes:
        processes.call("first", keep, 1)
        processes.call("reader", nodes.join, KEEPER)
        processes.call("reader", hold_back)
        processes.call("first", publish, 2)
        [said] = processes.call("first", close_without_waiting)
        assert "no reader" in said and "version '2'" in said


def refuse_another_model(node: Node) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = EmbeddingBagConfig(
                num_embeddings=5, embedding_dim=8, name="other", feature_names=["f"]
            )
            self.bags = EmbeddingBagCollection(tables=[table])

    with pytest.raises(ValueError, match="attach the same model"):
        keeper(Other, Unread(), node.path_of(KEEPER))


def test_readers_of_another_model(tmp_path: Path) -> None:
    with processes_of(tmp_path, FLOAT, "first", "second", "reader") as processes:
        processes.call("first", keep, 1)
        processes.call("reader", nodes.join, KEEPER)
        processes.kill("first")
        processes.call("second", refuse_another_model)
        assert processes.call("second", keep, None)


def keep_what_cant_be_read(node: Node) -> None:
    Path(node.path_of(f"{KEEPER}.tables")).write_text("{")
    assert not keep(node, 1)
    kept(node).close()
    node.offers.pop()
    path = Path(node.path_of(f"{KEEPER}.lock"))
    path.chmod(0o644)
    with pytest.raises(ValueError, match="is another user's, or open to others"):
        keep(node, 1)
    path.unlink()
    keep(node, 1)


def test_files_that_are_damaged(tmp_path: Path) -> None:
    (tmp_path / f"{KEEPER}.tables").touch(mode=0o600)
    with processes_of(tmp_path, FLOAT, "first") as processes:
        processes.call("first", keep_what_cant_be_read)


def build_means() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = EmbeddingBagCollection(
                is_weighted=False,
                tables=[
                    EmbeddingBagConfig(
                        num_embeddings=40 + table,
                        embedding_dim=4,
                        name=f"t{table}",
                        feature_names=[f"f{2 * table}", f"f{2 * table + 1}"],
                        pooling=PoolingType.MEAN if table else PoolingType.SUM,
                    )
                    for table in range(2)
                ],
            )

        def forward(self, ids: KeyedJaggedTensor) -> Any:
            return self.bags(ids)

    return Model()


def build_on_meta() -> nn.Module:
    model = build_means()
    model.dense = nn.Linear(1, 1, device="meta")
    return model


def test_results_are_those_of_the_unsharded_module(tmp_path: Path) -> None:
    """The features are in the batch in another order than in the module."""
    unsharded = build_means()
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(4, (4, 6), generator=generator)
    ids = KeyedJaggedTensor(
        ["f3", "f0", "f1", "f2"],
        torch.randint(40, (int(lengths.sum()),), generator=generator),
        lengths=lengths.view(-1),
    )
    with (
        torch.no_grad(),
        keeping.keeper(build_means, unsharded.state_dict(), tmp_path / "k", version="1") as made,
    ):
        expected, output = unsharded(ids), made.model(ids)
    assert output.keys() == expected.keys()
    assert output.length_per_key() == expected.length_per_key()
    # Means are rounded by FBGEMM, as in sharded modules.
    torch.testing.assert_close(output.values(), expected.values())


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    weights = build_means().state_dict()
    path = tmp_path / "k"
    for name, value, says in (
        ("bags.embedding_bags.t0.weight", None, "has no 'bags.embedding_bags.t0.weight'"),
        ("bags.embedding_bags.t1.weight", torch.zeros(41, 5), r"shape \[41, 5\], but"),
    ):
        wrong = {key: value if key == name else each for key, each in weights.items()}
        if value is None:
            del wrong[name]
        with pytest.raises(ValueError, match=says):
            keeper(build_means, wrong, path)
    with pytest.raises(ValueError, match="has no EmbeddingBagCollection"):
        keeper(lambda: nn.Linear(1, 1), weights, path)
    with pytest.raises(ValueError, match="the model is itself a collection"):
        keeper(lambda: build_means().bags, weights, path)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"\['dense.bias', 'dense.weight'\] are on the device"):
        keeper(build_on_meta, weights, path)
    with keeper(build_means, weights, path) as made:
        assert not made.took_over

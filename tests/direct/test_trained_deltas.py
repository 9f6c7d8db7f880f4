"""Two ranks train, a keeper watches their checkpoints and deltas, and each answer of a reader is
that of the trained model, not sharded, of the version that it names."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.direct.nodes import DEADLINE, Node, Nodes, until
from tests.direct.test_keeper import KEEPER, kept
from tests.direct.trained import SHARDERS, Training
from tests.distributed import models
from tests.tiers import slow_but
from torchrec_bls import DeltaWriter, attach, keeper, version_of

TRAINED = "tests.direct.trained"


class Trainer:
    """What a rank of the training has."""

    def __init__(self, node: Node, sharders: str) -> None:
        self.folder = Path(node.folder)
        self.training = Training(node.rank, sharders)
        self.writer = DeltaWriter(self.training.model, self.folder / "watched")
        self.number = 0

    def train(self) -> None:
        """Trains, and notes what the next version is to answer."""
        self.number += 1
        self.training.train(2)
        weights = self.training.weights()
        if dist.get_rank() == 0:
            save(weights, self.folder / "known" / f"step-{self.number}.pt")
        dist.barrier()

    def save_checkpoint(self) -> str:
        path = self.folder / "watched" / f"step-{self.number}.pt"
        weights = self.training.weights()
        if dist.get_rank() == 0:
            save(weights, path)
        dist.barrier()
        return path.name


def save(weights: dict[str, torch.Tensor], path: Path) -> None:
    hidden = path.with_name(f".{path.name}")
    torch.save(weights, hidden)
    hidden.rename(path)


def begin_training(node: Node, sharders: str) -> None:
    trainer = node.trainer = Trainer(node, sharders)  # type: ignore[attr-defined]
    trainer.train()
    trainer.save_checkpoint()


def write_deltas(node: Node, base: str | None, count: int) -> int:
    """Writes deltas, the first one of a base; returns the number of the last version."""
    trainer: Trainer = node.trainer  # type: ignore[attr-defined]
    for number in range(count):
        trainer.train()
        trainer.writer.write(f"step-{trainer.number}", base=base if number == 0 else None)
    return trainer.number


def write_checkpoint(node: Node) -> str:
    trainer: Trainer = node.trainer  # type: ignore[attr-defined]
    trainer.train()
    return trainer.save_checkpoint()


def keep_watching(node: Node) -> bool:
    """Keeps the first checkpoint, or what readers have, and watches."""
    node.expected.folder = Path(node.folder) / "known"
    watched = Path(node.folder) / "watched"
    made = keeper(node.served.bare_model, watched / "step-1.pt", node.path_of(KEEPER))
    node.offers.append(made)  # type: ignore[arg-type]
    node.model = made.model
    made.watch(watched, pause=0.01, deadline=DEADLINE)
    return made.took_over


def problem_of(node: Node) -> str:
    [watch] = kept(node)._watches
    return watch.problem


def join(node: Node) -> None:
    node.expected.folder = Path(node.folder) / "known"
    node.model = node.served.bare_model()
    attach(node.model, node.path_of(KEEPER), deadline=DEADLINE)
    check(node, 0)


def check_until(node: Node, end: str) -> None:
    """Looks batches up until a file exists."""
    number = 0
    while not Path(node.path_of(end)).exists() or number < 200:
        check(node, number)
        number += 1


def check(node: Node, number: int) -> int:
    """Compares an answer with that of the version that it says it is of; returns its number."""
    batch = number % len(node.batches)
    with torch.no_grad():
        output = node.model(node.batches[batch])
    found: int = node.served.number_of(version_of(node.model))
    expected = node.expected.of(found, batch)
    models.assert_same_bits(output, expected)
    assert int(node.model.steps) == 2 * found
    return found


def go_over(node: Node, version: int) -> None:
    until(lambda: check(node, 0) == version)
    for number in range(len(node.batches)):
        assert check(node, number) == version


@pytest.mark.parametrize("sharders", slow_but(["torchrec"], SHARDERS))
def test_a_reader_answers_as_the_training_does(tmp_path: Path, sharders: str) -> None:
    for name in ("watched", "known"):
        (tmp_path / name).mkdir()
    processes, ranks = Nodes(tmp_path, TRAINED), [0, 1]
    try:
        processes.start_ranks(2)
        processes.call_all(ranks, begin_training, sharders)
        for name in ("keeper", "reader", "other", "successor"):
            processes.start(name)
        assert not processes.call("keeper", keep_watching)
        for name in ("reader", "other"):
            processes.call(name, join)
        processes.begin("reader", check_until, "end")
        last, _ = processes.call_all(ranks, write_deltas, "step-1.pt", 4)
        processes.call("other", go_over, last)
        # A keeper that follows goes on with the next delta.
        processes.kill("keeper")
        last, _ = processes.call_all(ranks, write_deltas, None, 1)
        assert processes.call("successor", keep_watching)
        last, _ = processes.call_all(ranks, write_deltas, None, 2)
        processes.call("other", go_over, last)
        # A checkpoint comes in between, and one delta is lost.
        base, _ = processes.call_all(ranks, write_checkpoint)
        processes.call("other", go_over, last + 1)
        last, _ = processes.call_all(ranks, write_deltas, base, 1)
        processes.call("other", go_over, last)
        processes.call_all(ranks, lose_a_delta)
        newest, _ = processes.call_all(ranks, write_deltas, None, 1)
        until(lambda: f"step-{newest}.delta is not" in processes.call("successor", problem_of))
        processes.call("other", go_over, last)
        processes.call_all(ranks, write_checkpoint)
        processes.call("other", go_over, newest + 1)
        # The look that has published it tells its outcome when it ends.
        until(lambda: processes.call("successor", problem_of) == "")
        (tmp_path / "end").touch()
        processes.end("reader")
        processes.call("reader", go_over, newest + 1)
    finally:
        (tmp_path / "end").touch()
        processes.close()


def lose_a_delta(node: Node) -> None:
    """Writes a delta where nobody watches."""
    trainer: Trainer = node.trainer  # type: ignore[attr-defined]
    trainer.train()
    trainer.writer._directory = trainer.folder
    trainer.writer.write(f"step-{trainer.number}")
    trainer.writer._directory = trainer.folder / "watched"

"""Deltas of a training have the rows that have changed, as they are, and the dense weights."""

import re
import signal
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from tests.direct.at_every_line import places_of, some_of, strike
from tests.direct.trained import REPLICATED, SHARDERS, Model, Training
from tests.distributed import models
from tests.processes import run, run_outcomes
from torchrec_bls import BLSConfig, BLSEmbeddingBagCollectionSharder, DeltaWriter
from torchrec_bls import delta_writer as module
from torchrec_bls.checkpoints import Delta
from torchrec_bls.errors import PoisonedError


def applied(before: dict[str, torch.Tensor], delta: Delta) -> dict[str, torch.Tensor]:
    """Returns weights after a delta."""
    after = {name: value.clone() for name, value in before.items()}
    for name, (ids, rows) in delta.rows().items():
        after[name][ids] = rows
    dense = delta.dense()
    assert dense.keys() == {name for name in before if "embedding" not in name}
    return after | dense


def check_delta(path: Path, before: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> Delta:
    """Compares what a delta makes of the weights before with those of now, bit by bit."""
    with Delta(path) as delta:
        found = applied(before, delta)
        assert found.keys() == now.keys()
        for name, value in now.items():
            assert torch.equal(found[name], value), name
    return delta


def write_what_has_changed(rank: int, folder: str, sharders: str) -> None:
    training = Training(rank, sharders)
    training.train(2)  # the tracker does not know of these
    writer = DeltaWriter(training.model, folder)
    before, first, version = training.weights(), 2, "checkpoint"
    for steps in (3, 1, 0, 4):
        training.train(steps)
        last, name = first + steps, f"step-{first + steps}-{steps}"
        now = training.weights()
        began = time.time()
        made = writer.write(name, base="checkpoint" if version == "checkpoint" else None)
        assert re.fullmatch(f"{name}@[0-9a-f]{{8}}", made)
        path = Path(folder) / f"{name}.delta"
        delta = check_delta(path, before, now)
        assert (delta.version, delta.base) == (made, version)
        with Delta(path) as opened:
            assert began - 5 < opened.trained < time.time()  # another rank may have begun before
            rows = {key: set(ids.tolist()) for key, (ids, _) in opened.rows().items()}
        seen = {key: ids for key, ids in training.ids_between(first, last).items() if ids}
        assert rows == seen | {REPLICATED: set(range(len(now[REPLICATED])))}
        before, first, version = now, last, made
    dist.barrier()
    assert not list(Path(folder).glob(".*"))


@pytest.mark.parametrize("sharders", SHARDERS)
def test_a_delta_leads_from_the_version_before_to_this_one(tmp_path: Path, sharders: str) -> None:
    run(2, write_what_has_changed, str(tmp_path / "made" / "by it"), sharders)


def train_with_bad_ids(rank: int, folder: str) -> None:
    """fbgemm takes row 0 for them, and trains it."""
    training = Training(rank, "torchrec")
    writer = DeltaWriter(training.model, folder)
    before = training.weights()
    batch = training.batch_of(1, rank)
    ids = batch.values().clone()
    of_first = int(batch["f_tw"].lengths().sum())
    assert of_first > 1
    ids[1:of_first] = 1000
    bad = KeyedJaggedTensor(batch.keys(), ids, lengths=batch.lengths())
    training.batch_of = lambda *_: bad  # type: ignore[method-assign]
    training.train(1)
    now = training.weights()
    table = "bags.embedding_bags.b_tw.weight"
    assert not torch.equal(before[table][0], now[table][0])
    writer.write("one", base="checkpoint")
    check_delta(Path(folder) / "one.delta", before, now)


def test_ids_that_are_out_of_range(tmp_path: Path) -> None:
    run(2, train_with_bad_ids, str(tmp_path))


def look_up_without_forwards(rank: int, folder: str) -> None:
    """A pipeline calls the modules, and not the model that has the tracker."""
    training = Training(rank, "bls")
    writer = DeltaWriter(training.model, folder)
    training.model.forward = training.model._dmp_wrapped_module
    for number in range(1, 4):
        before = training.weights()
        training.train(1)
        writer.write(f"{number}", base="checkpoint" if number == 1 else None)
        check_delta(Path(folder) / f"{number}.delta", before, training.weights())


def test_batches_that_go_past_the_model(tmp_path: Path) -> None:
    run(2, look_up_without_forwards, str(tmp_path))


def fail_at(places: dict[str, BaseException], rank: int, failing: int) -> Callable[[], None]:
    """Has functions of the module fail on a rank; returns what undoes it."""
    own = {name: getattr(module, name) for name in places}

    def undo() -> None:
        for name, function in own.items():
            setattr(module, name, function)

    for name, error in places.items():

        def fail(*_: Any, error: BaseException = error) -> None:
            raise error

        if rank == failing:
            setattr(module, name, fail)
    return undo


def write_in_spite_of_failures(rank: int, folder: str) -> None:
    training = Training(rank, "torchrec")
    writer = DeltaWriter(training.model, folder)
    before = training.weights()
    base: str | None = "checkpoint"
    for number, (name, failing) in enumerate(
        [("write_part", 0), ("write_part", 1), ("_dense_of", 0), ("_shards_of", 1)]
    ):
        training.train(1)
        error = KeyboardInterrupt("a signal") if number == 1 else OSError(28, "No space left")
        undo = fail_at({name: error}, rank, failing)
        expected: Any = type(error) if rank == failing else PoisonedError
        with pytest.raises(expected, match=r"a signal|No space left"):
            writer.write("one", base=base)
        undo()
        dist.barrier()
        assert list(Path(folder).iterdir()) == []
    training.train(1)
    now = training.weights()
    made = writer.write("one", base=base)
    check_delta(Path(folder) / "one.delta", before, now)
    # The names are checked on all ranks before anything is read.
    for version, asked, says in [
        ("one", None, "one.delta is there already"),
        ("", None, "printable text"),
        ("a/b", None, "must name a folder"),
        (".a", None, "must name a folder"),
        ("n" * 56, None, "at most 55 bytes"),
        ("two", "checkpoint", "rows that have changed since that version are in a later delta"),
        ("two", "", "version is ''"),
        ("two", f"new {rank}", "other versions or bases"),
        (f"two {rank}", None, "other versions or bases"),
    ]:
        with pytest.raises((ValueError, PoisonedError), match=says):
            writer.write(version, asked)
    training.train(1)
    later = training.weights()
    assert writer.write("two", made) != made
    check_delta(Path(folder) / "two.delta", now, later)
    with pytest.raises(ValueError, match="in a later delta"):
        writer.write("three", "one")
    writer.write("three", "checkpoint-2")
    dist.barrier()
    assert {each.name for each in Path(folder).iterdir()} == {
        *("one.delta", "two.delta", "three.delta")
    }


def test_a_rank_that_fails_leaves_nothing_and_loses_nothing(tmp_path: Path) -> None:
    run(2, write_in_spite_of_failures, str(tmp_path))


def write_after_a_reshard(rank: int, folder: str) -> None:
    training = Training(rank, "torchrec")
    writer = DeltaWriter(training.model, folder)
    training.train(1)
    shards_of = module._shards_of

    def moved(*args: Any) -> Any:
        for shard in shards_of(*args):
            yield shard._replace(first_row=shard.first_row + 1)

    if rank == 1:
        module._shards_of = moved
    for _ in range(2):
        with pytest.raises((ValueError, PoisonedError), match="was sharded anew"):
            writer.write("one", base="checkpoint")
    dist.barrier()
    assert list(Path(folder).iterdir()) == []


def test_ids_of_other_shards_are_written_nowhere(tmp_path: Path) -> None:
    run(2, write_after_a_reshard, str(tmp_path))


def lose_ids(rank: int, folder: str) -> None:
    training = Training(rank, "torchrec")
    writer = DeltaWriter(training.model, folder)
    training.train(1)
    writer.write("one", base="checkpoint")
    training.train(1)
    take = writer._tracker.get_unique_ids

    def interrupted() -> None:
        take()
        raise KeyboardInterrupt

    if rank == 1:
        writer._tracker.get_unique_ids = interrupted
    with pytest.raises((KeyboardInterrupt, PoisonedError)):
        writer.write("two")
    writer._tracker.get_unique_ids = take
    for base in (None, "checkpoint-2"):
        with pytest.raises(
            (ValueError, PoisonedError), match="make a new DeltaWriter on all ranks"
        ):
            writer.write("two", base)
    again = DeltaWriter(training.model, folder)
    with pytest.raises(ValueError, match=r"another DeltaWriter was made"):
        writer.write("two")
    before = training.weights()  # as a checkpoint
    training.train(1)
    again.write("three", base="checkpoint-2")
    check_delta(Path(folder) / "three.delta", before, training.weights())


def test_ids_that_an_interrupt_has_lost_are_not_passed_over(tmp_path: Path) -> None:
    run(2, lose_ids, str(tmp_path))


def strike_writes(rank: int, folder: str, step: int) -> None:
    """Strikes at places of `write`. Each delta that is there leads on from its base."""
    training = Training(rank, "torchrec")
    known = {"checkpoint": training.weights()}

    def check_all() -> None:
        for path in Path(folder).glob("[!.]*"):
            with Delta(path) as delta:
                version, base = delta.version, delta.base
            if version not in known:
                known[version] = now
                check_delta(path, known[base], now)

    writer, base, number = DeltaWriter(training.model, folder), "checkpoint", 0
    training.train(1)
    now = training.weights()
    places = places_of(lambda: writer.write("0", "checkpoint"))
    check_all()
    assert len(places) > 60
    for place, error in zip(some_of(places, step), cycle([KeyboardInterrupt, OSError])):
        for struck in (True, False):
            number += 1
            training.train(1)
            now = training.weights()

            def write(writer: DeltaWriter = writer, number: int = number) -> None:
                writer.write(str(number))

            if struck:
                strike(write, place, error)
                check_all()
                continue
            try:
                write()
            except ValueError as lost:
                assert "was interrupted" in str(lost), place
                writer, base = DeltaWriter(training.model, folder), f"checkpoint-{number}"
                known[base] = now
                training.train(1)
                now = training.weights()
                writer.write(str(number), base)
            assert (Path(folder) / f"{number}.delta").exists(), place
            check_all()


def test_an_exception_at_any_line_of_a_write(tmp_path: Path) -> None:
    run(1, strike_writes, str(tmp_path), 3)


def die_before_the_others_are_done(rank: int, folder: str) -> None:
    training = Training(rank, "torchrec")
    writer = DeltaWriter(training.model, folder)
    training.train(1)
    if rank == 1:
        write_part = module.write_part

        def die(*args: Any) -> None:
            write_part(*args)
            signal.raise_signal(signal.SIGKILL)

        module.write_part = die  # type: ignore[assignment]
    writer.write("one", base="checkpoint")


def test_a_rank_that_dies_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    outcomes = run_outcomes(2, die_before_the_others_are_done, str(tmp_path))
    assert all(outcome.error is not None for outcome in outcomes)
    assert all(each.name.startswith(".one.delta.") for each in tmp_path.iterdir())


def refuse_models(rank: int, folder: str) -> None:
    with pytest.raises(ValueError, match="the model is a Model, but must be a Distributed"):
        DeltaWriter(Model(), folder)

    def of(module: nn.Module) -> DistributedModelParallel:
        sharder = BLSEmbeddingBagCollectionSharder(dict(models.SGD), config=BLSConfig())
        return DistributedModelParallel(module, device=models.CPU, sharders=[sharder])

    def bags(*tables: tuple[str, str]) -> EmbeddingBagCollection:
        return EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name, num_embeddings=9, embedding_dim=8, feature_names=[feature]
                )
                for name, feature in tables
            ]
        )

    class Two(nn.Module):
        def __init__(self, first: nn.Module, second: nn.Module) -> None:
            super().__init__()
            self.first, self.second = first, second

    class Extra(nn.Module):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

        def set_extra_state(self, state: object) -> None:
            pass

    with pytest.raises(ValueError, match=r"feature 'f' is looked up in .*a.weight' and in .*b"):
        DeltaWriter(of(Two(bags(("a", "f"), ("b", "f")), nn.Linear(1, 1))), folder)
    with pytest.raises(ValueError, match="feature 'f' is looked up in"):
        DeltaWriter(of(Two(bags(("a", "f")), bags(("b", "f")))), folder)
    with pytest.raises(ValueError, match=r"does not know \['first.embedding_bags.a.weight'\]"):
        DeltaWriter(of(Two(bags(("a", "f")), bags(("a", "g")))), folder)
    with pytest.raises(ValueError, match=r"'second._extra_state' is a dict"):
        DeltaWriter(of(Two(bags(("a", "f")), Extra())), folder)
    with pytest.raises(ValueError, match="which is no table of the model"):
        DeltaWriter(of(Two(bags(("second", "f")), nn.Linear(1, 1))), folder)


def test_models_whose_rows_can_not_be_tracked(tmp_path: Path) -> None:
    run(2, refuse_models, str(tmp_path))

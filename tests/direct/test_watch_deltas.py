"""Deltas in a directory are applied to what they were written for, and to nothing else."""

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.direct import served
from tests.direct.nodes import until
from tests.direct.test_watch import IDS, SECOND, TABLE, Model, shown, weights_of, write
from tests.processes import run
from torchrec_bls import Keeper, Watch, keeper, serving_state, watch
from torchrec_bls.checkpoints import Head, TablePart, write_part
from torchrec_bls.errors import PeerTimeoutError

ALL = torch.arange(5)


def rows(number: float, ids: torch.Tensor = ALL) -> TablePart:
    return TablePart(ids, {0: torch.full((len(ids), 4), float(number))})


def write_delta(
    folder: Path,
    name: str,
    base: str,
    seconds: int,
    tables: dict[str, TablePart],
    dense: dict[str, torch.Tensor] | None = None,
) -> str:
    """Writes a delta whose last file is of a time; returns the version that it makes."""
    path, version = folder / f"{name}.delta", f"{name}@0a0b0c0d"
    path.mkdir()
    write_part(path, Head(version, base, 0, 1, 1.7e9), tables, dense or {})
    for file in path.iterdir():
        os.utime(file, ns=(seconds * SECOND, seconds * SECOND))
    return version


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # No thread looks: the test says when.
    monkeypatch.setattr(Watch, "_look_on", lambda watched, _: watched._ends.wait())
    made = tmp_path / "checkpoints"
    made.mkdir()
    return made


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Keeper]:
    with keeper(Model, weights_of(0), tmp_path / "k", version="first") as made:
        yield made


@pytest.fixture
def watched(kept: Keeper, folder: Path) -> Iterator[Watch]:
    with kept.watch(folder) as made:
        yield made


def test_a_delta_that_does_not_pass_its_probe_is_not_served(kept: Keeper, folder: Path) -> None:
    def probe(model: torch.nn.Module) -> bool:
        return bool((model(IDS) < 5).all())

    write(folder / "step-1", 1, 100)
    ids = type(IDS)(["f"], ALL, lengths=torch.ones(5, dtype=torch.int64))
    with kept.watch(folder, probe=probe) as watched, torch.no_grad():
        assert watched.look() and shown(kept) == 1
        # The second one of each kind is written to the side that the first one has left.
        for number in (2, 3):
            base = kept.version
            write_delta(folder, f"bad-{number}", base, 100 * number, {TABLE: rows(7, ALL[:3])})
            assert not watched.look() and kept.version == base
            assert (
                "bad" in watched.problem and "does not pass: it returned False" in watched.problem
            )
            good = write_delta(
                folder, f"good-{number}", base, 100 * number + 1, {TABLE: rows(number, ALL[2:3])}
            )
            assert watched.look() and kept.version == good
            assert kept.model(ids)[:, 0].tolist() == [1, 1, number, 1, 1]


def test_a_chain_is_followed_by_its_bases(kept: Keeper, folder: Path, watched: Watch) -> None:
    """Not by times or names. Each step has its own rows."""
    write(folder / "step-1", 1, 100)
    assert watched.look() and serving_state(kept.model).trained == 100
    second = write_delta(folder, "step-9", "step-1", 105, {TABLE: rows(2, ALL[:2])})
    third = write_delta(folder, "step-3", second, 104, {TABLE: rows(3, ALL[1:3])})
    assert watched.look() and kept.version == third
    with torch.no_grad():
        assert kept.model(IDS).tolist() == [[3.0] * 4, [3.0] * 4]
        ids = type(IDS)(["f"], ALL, lengths=torch.ones(5, dtype=torch.int64))
        assert kept.model(ids)[:, 0].tolist() == [2, 3, 3, 1, 1]
    assert not watched.look() and watched.problem == ""
    assert serving_state(kept.model).trained == 1.7e9
    fourth = write_delta(folder, "step-4", third, 106, {TABLE: rows(4)})
    assert watched.look() and kept.version == fourth and shown(kept) == 4
    assert [each.path.name for each in watched.published] == ["step-1"]


def test_the_base_may_be_what_served_before_the_watch(
    kept: Keeper, folder: Path, watched: Watch
) -> None:
    version = write_delta(folder, "one", "first", 100, {TABLE: rows(1)})
    assert watched.look() and (kept.version, shown(kept)) == (version, 1)


def test_dense_weights_change_with_the_rows(kept: Keeper, folder: Path, watched: Watch) -> None:
    """Those that the model lacks are left out, as those of a checkpoint are."""
    dense = {"dense.bias": torch.tensor([7.0]), "head.of.training": torch.ones(3)}
    write_delta(folder, "one", "first", 100, {TABLE: rows(1)}, dense)
    assert watched.look() and shown(kept) == 1
    assert kept.model.dense.bias.tolist() == [7.0] and kept.model.dense.weight.tolist() == [[0.0]]
    write_delta(folder, "two", "one@0a0b0c0d", 101, {}, {"dense.bias": torch.tensor([8.0])})
    assert watched.look() and shown(kept) == 1 and kept.model.dense.bias.tolist() == [8.0]


def test_a_gap_is_told_once_and_ends_with_the_next_checkpoint(
    kept: Keeper, folder: Path, watched: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder / "step-1", 1, 100)
    second = write_delta(folder, "step-2", "step-1", 101, {TABLE: rows(2)})
    write_delta(folder, "step-4", "step-3@0a0b0c0d", 103, {TABLE: rows(4)})
    write_delta(folder, "step-5", "step-4@0a0b0c0d", 104, {TABLE: rows(5)})
    with caplog.at_level(logging.WARNING):
        assert watched.look() and kept.version == second
        for _ in range(3):
            assert not watched.look() and shown(kept) == 2
    [record] = caplog.records
    assert watched.problem == record.getMessage() and watched.failed == 0
    assert str(folder / "step-4.delta") in watched.problem
    assert f"on version 'step-3@0a0b0c0d', but '{second}' serves" in watched.problem
    write(folder / "step-6", 6, 105)
    assert watched.look() and shown(kept) == 6 and watched.problem == ""
    assert not watched.look() and watched.problem == ""
    write_delta(folder, "step-7", "step-6", 106, {TABLE: rows(7)})
    assert watched.look() and shown(kept) == 7 and watched.problem == ""


def test_a_link_that_comes_late_closes_the_gap(kept: Keeper, folder: Path, watched: Watch) -> None:
    write_delta(folder, "three", "two@0a0b0c0d", 103, {TABLE: rows(3, ALL[:1])})
    assert not watched.look() and "'two@0a0b0c0d', but 'first' serves" in watched.problem
    write_delta(folder, "two", "first", 102, {TABLE: rows(2)})
    assert watched.look() and kept.version == "three@0a0b0c0d" and watched.problem == ""


def test_a_checkpoint_that_is_newer_than_a_delta_is_served(
    kept: Keeper, folder: Path, watched: Watch
) -> None:
    """And no older one afterwards, which only the delta is newer than."""
    write(folder / "a", 1, 100)
    version = write_delta(folder, "b", "a", 110, {TABLE: rows(2)})
    assert watched.look() and shown(kept) == 2
    write(folder / "late", 9, 105)
    assert not watched.look() and kept.version == version
    write(folder / "c", 3, 120)
    write_delta(folder, "d", version, 119, {TABLE: rows(4)})
    assert watched.look() and shown(kept) == 3 and watched.problem == ""


def test_a_delta_is_not_of_a_later_checkpoint_of_the_same_name(
    kept: Keeper, folder: Path, watched: Watch
) -> None:
    """The training began again, and its old delta is still there."""
    write(folder / "step-1", 1, 100)
    write_delta(folder, "step-2", "step-1", 101, {TABLE: rows(2, ALL[:2])})
    assert watched.look()
    shutil.rmtree(folder / "step-1")
    write(folder / "step-1", 5, 200)
    assert watched.look() and shown(kept) == 5 and watched.problem == ""
    assert not watched.look() and shown(kept) == 5
    write_delta(folder, "step-2-again", "step-1", 201, {TABLE: rows(6)})
    assert watched.look() and shown(kept) == 6


def test_another_watch_goes_on_where_the_first_one_stopped(kept: Keeper, folder: Path) -> None:
    """So does that of a successor: it publishes no older checkpoint."""
    write(folder / "a", 1, 100)
    version = write_delta(folder, "b", "a", 101, {TABLE: rows(2)})
    with kept.watch(folder) as first:
        assert first.look()
    shutil.rmtree(folder / "a")
    write(folder / "a", 1, 100)
    with kept.watch(folder) as second:
        assert not second.look() and kept.version == version and second.problem == ""
        write_delta(folder, "c", version, 102, {TABLE: rows(3)})
        assert second.look() and shown(kept) == 3 and second.published == []


def test_after_a_roll_back_deltas_wait_for_a_newer_checkpoint(
    kept: Keeper, folder: Path, watched: Watch
) -> None:
    write(folder / "a", 1, 100)
    write_delta(folder, "a1", "a", 101, {TABLE: rows(2)})
    assert watched.look() and shown(kept) == 2
    write(folder / "b", 3, 102)
    last = write_delta(folder, "b1", "b", 103, {TABLE: rows(4)})
    assert watched.look() and shown(kept) == 4
    assert watched.roll_back().startswith("a@") and shown(kept) == 1
    assert not watched.look() and shown(kept) == 1 and watched.problem == ""
    write_delta(folder, "b2", last, 104, {TABLE: rows(5)})
    assert not watched.look() and shown(kept) == 1 and f"on version '{last}'" in watched.problem
    write(folder / "c", 6, 105)
    write_delta(folder, "c1", "c", 106, {TABLE: rows(7)})
    assert watched.look() and shown(kept) == 7 and watched.problem == ""


def test_nothing_is_applied_to_what_somebody_else_has_published(
    kept: Keeper, folder: Path, watched: Watch
) -> None:
    write(folder / "a", 1, 100)
    write_delta(folder, "a1", "a", 101, {TABLE: rows(2)})
    assert watched.look() and shown(kept) == 2
    kept.publish(folder / "a")
    assert not watched.look() and shown(kept) == 1
    write_delta(folder, "a2", "a", 102, {TABLE: rows(3)})
    assert not watched.look() and shown(kept) == 1 and "but 'a@" in watched.problem


MORE = "bags.embedding_bags.more.weight"


@pytest.mark.parametrize(
    ("tables", "dense", "says"),
    [
        ({TABLE: rows(nan)}, {}, f"'{TABLE}' has NaN"),
        ({TABLE: TablePart(ALL, {0: torch.ones(5, 4).double()})}, {}, "float64"),
        ({TABLE: TablePart(ALL, {0: torch.ones(5, 3)})}, {}, r"\[5, 3\]"),
        ({TABLE: rows(1, ALL + 1)}, {}, "id 5 is no row"),
        ({MORE: rows(1)}, {}, r"no tables \['bags.embedding_bags.more.weight'\]"),
        ({}, {"dense.bias": torch.ones(2)}, r"'dense.bias' has shape \[2\]"),
        ({}, {TABLE: torch.ones(5, 4)}, r"no dense weights \['bags"),
        ({TABLE: TablePart(ALL.flip(0), {0: torch.ones(5, 4)})}, {}, "not in ascending order"),
    ],
    ids=["NaN", "dtype", "shape", "row", "unknown table", "dense", "table as dense", "order"],
)
def test_bad_ones_change_nothing(
    kept: Keeper,
    folder: Path,
    watched: Watch,
    caplog: pytest.LogCaptureFixture,
    tables: dict[str, TablePart],
    dense: dict[str, torch.Tensor],
    says: str,
) -> None:
    write(folder / "good", 1, 100)
    write_delta(folder, "bad", "good", 101, tables, dense)
    write_delta(folder, "next", "bad@0a0b0c0d", 102, {TABLE: rows(3)})
    with caplog.at_level(logging.WARNING):
        assert watched.look() and shown(kept) == 1
        for _ in range(3):
            assert not watched.look()
    [record] = caplog.records
    assert watched.problem == record.getMessage() and watched.failed == 1
    assert str(folder / "bad.delta") in watched.problem and re.search(says, watched.problem)
    shutil.rmtree(folder / "bad.delta")
    write_delta(folder, "bad", "good", 103, {TABLE: rows(2)})
    assert watched.look() and shown(kept) == 3 and watched.problem == ""


def cut(path: Path) -> None:
    [file] = path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])


def remove_one(path: Path) -> None:
    [file] = path.iterdir()
    file.unlink()
    write_part(path, Head("two@0a0b0c0d", "first", 1, 2, 1.7e9), {TABLE: rows(2)}, {})


@pytest.mark.parametrize("damage", [cut, remove_one])
def test_what_is_not_complete_is_left_out(
    kept: Keeper,
    folder: Path,
    watched: Watch,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    write_delta(folder, "two", "first", 100, {TABLE: rows(2)})
    damage(folder / "two.delta")
    (folder / ".three.delta.0a0b0c0d").mkdir()
    with caplog.at_level(logging.INFO):
        assert not watched.look() and not watched.look()
    [record] = [each for each in caplog.records if "is left out" in each.getMessage()]
    assert record.getMessage().startswith(f"{folder / 'two.delta'} is left out: ")
    assert (watched.problem, watched.failed, shown(kept)) == ("", 0, 0)
    shutil.rmtree(folder / "two.delta")
    write_delta(folder, "two", "first", 100, {TABLE: rows(2)})
    assert watched.look() and shown(kept) == 2


def test_one_that_changes_before_it_is_read(
    kept: Keeper, folder: Path, watched: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_delta(folder, "two", "first", 100, {TABLE: rows(2)})
    publish = watched._publish_delta

    def publish_late(*args: Any) -> None:
        shutil.rmtree(folder / "two.delta")
        write_delta(folder, "two", "first", 101, {TABLE: rows(9)})
        monkeypatch.setattr(watched, "_publish_delta", publish)
        publish(*args)

    monkeypatch.setattr(watched, "_publish_delta", publish_late)
    assert not watched.look() and "two.delta has changed since" in watched.problem
    assert watched.look() and shown(kept) == 9


@pytest.mark.parametrize("drain", [False, True])
def test_a_reader_in_a_batch_is_waited_for_again(
    kept: Keeper, folder: Path, monkeypatch: pytest.MonkeyPatch, drain: bool
) -> None:
    """That says nothing about the delta, whatever becomes of checkpoints."""
    with kept.watch(folder, drain=drain) as watched:
        write_delta(folder, "two", "first", 100, {TABLE: rows(2)})
        with monkeypatch.context() as busy:

            def time_out(*_: Any, **__: Any) -> None:
                raise PeerTimeoutError("process 4711 still runs a batch")

            busy.setattr(kept, "publish_rows", time_out)
            assert not watched.look() and "process 4711" in watched.problem
        assert watched.look() and shown(kept) == 2 and watched.problem == ""


def test_a_version_that_was_mapped_late_is_followed(
    kept: Keeper, folder: Path, watched: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was announced, and serves since its deadline has passed."""
    version = write_delta(folder, "two", "first", 100, {TABLE: rows(2)})
    publish_rows = kept.publish_rows

    def publish_late(*args: Any, **named: Any) -> None:
        publish_rows(*args, **named)
        raise PeerTimeoutError("it is still being mapped")

    with monkeypatch.context() as late:
        late.setattr(kept, "publish_rows", publish_late)
        assert not watched.look()
    assert kept.version == version
    write_delta(folder, "three", version, 101, {TABLE: rows(3)})
    assert watched.look() and shown(kept) == 3 and watched.problem == ""


def test_a_model_that_is_attached_follows_deltas(kept: Keeper, folder: Path) -> None:
    write(folder / "a", 1, 100)
    write_delta(folder, "b", "a", 101, {TABLE: rows(2)})
    with watch(kept.model, folder, pause=0.005) as watched:
        assert watched.look() and shown(kept) == 2


def test_a_thread_follows_by_itself(kept: Keeper, tmp_path: Path) -> None:
    with kept.watch(tmp_path, pause=0.005):
        write_delta(tmp_path, ".two", "first", 100, {TABLE: rows(2)})
        (tmp_path / ".two.delta").rename(tmp_path / "two.delta")
        until(lambda: kept.version != "first")
        assert shown(kept) == 2


def tell_that_tables_are_loaded(rank: int, folder: str) -> None:
    model = served.sharded()
    with torch.no_grad():
        model(served.batches_of(rank)[0])
    write_delta(Path(folder), "two", "(first forward)", 100, {})
    with watch(model, folder, pause=600.0) as watched:
        watched.look()
        assert "the weights of this model show its tables" in watched.problem
        assert not watched.look() and watched.failed == 1


def test_a_process_that_may_publish_no_rows_says_so(tmp_path: Path) -> None:
    run(1, tell_that_tables_are_loaded, str(tmp_path))

"""New checkpoints in a directory are published; bad ones change nothing."""

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
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.direct.nodes import until
from torchrec_bls import Keeper, Watch, keeper, watch
from torchrec_bls.direct.arguments import check_version
from torchrec_bls.direct.keeping.checkpoint_weights import order_of, version_of_checkpoint
from torchrec_bls.errors import DrainedError, PeerTimeoutError, RendezvousError

SECOND = 10**9
IDS = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(num_embeddings=5, embedding_dim=4, name="t", feature_names=["f"])
        self.bags = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
        self.dense = nn.Linear(1, 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        values: torch.Tensor = self.bags(ids).values()
        return values


def weights_of(number: float) -> dict[str, torch.Tensor]:
    return {
        "bags.embedding_bags.t.weight": torch.full((5, 4), float(number)),
        "dense.weight": torch.zeros(1, 1),
        "dense.bias": torch.zeros(1),
    }


def write(path: Path, number: float, seconds: int, weights: Any = None) -> Path:
    """Writes a checkpoint whose last file is of a time."""
    path.mkdir()
    file = path / "weights.pt"
    torch.save(weights_of(number) if weights is None else weights, file)
    os.utime(file, ns=(seconds * SECOND, seconds * SECOND))
    return path


def shown(kept: Keeper) -> float:
    """Returns the number that all of the tables show."""
    with torch.no_grad():
        [number] = set(kept.model(IDS).flatten().tolist())
    return float(number)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread looks in a test: the test says when."""
    monkeypatch.setattr(Watch, "_look_on", lambda watched, _: watched._ends.wait())


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Keeper]:
    with keeper(Model, weights_of(0), tmp_path / "k", version="first") as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "checkpoints"
    made.mkdir()
    return made


@pytest.fixture
def watched(kept: Keeper, folder: Path, by_hand: None) -> Iterator[Watch]:
    with kept.watch(folder) as made:
        yield made


def test_the_newest_is_published_once(kept: Keeper, folder: Path, watched: Watch) -> None:
    """By its time, and not by its name or by when it was seen first."""
    write(folder / "step-9", 9, 100)
    write(folder / "step-10", 10, 90)
    assert watched.look()
    assert shown(kept) == 9 and kept.version.startswith("step-9@")
    assert not watched.look() and watched.problem == ""
    write(folder / "step-3", 3, 101)
    assert watched.look() and shown(kept) == 3
    write(folder / "step-99", 99, 50)
    assert not watched.look() and shown(kept) == 3
    assert [each.path.name for each in watched.published] == ["step-9", "step-3"]


def test_numbers_in_names_decide_between_equal_times(
    kept: Keeper, folder: Path, watched: Watch
) -> None:
    write(folder / "step-9", 9, 100)
    write(folder / "step-10", 10, 100)
    assert watched.look() and shown(kept) == 10
    assert not watched.look()


def test_files_that_were_written_anew_are_another_version(
    kept: Keeper, folder: Path, watched: Watch
) -> None:
    write(folder / "latest", 1, 100)
    assert watched.look()
    first = kept.version
    shutil.rmtree(folder / "latest")
    write(folder / "latest", 2, 101)
    assert watched.look() and shown(kept) == 2
    assert kept.version != first and kept.version.startswith("latest@")


def test_a_version_is_never_replaced_by_an_older_one(
    kept: Keeper, folder: Path, watched: Watch
) -> None:
    write(folder / "a", 1, 100)
    write(folder / "b", 2, 101)
    watched.look()
    shutil.rmtree(folder / "b")
    assert not watched.look() and shown(kept) == 2
    kept.publish(folder / "a")  # a roll-back by hand
    assert not watched.look() and shown(kept) == 1


def test_rolling_back(kept: Keeper, folder: Path, watched: Watch) -> None:
    write(folder / "a", 1, 100)
    watched.look()
    with pytest.raises(ValueError, match=r"1 checkpoints of .* and none before"):
        watched.roll_back()
    write(folder / "b", 2, 101)
    watched.look()
    assert watched.roll_back().startswith("a@")
    assert shown(kept) == 1
    assert not watched.look() and shown(kept) == 1
    write(folder / "c", 3, 102)
    assert watched.look() and shown(kept) == 3
    os.utime(folder / "a" / "weights.pt", ns=(7, 7))
    with pytest.raises(ValueError, match="has changed since it was published"):
        watched.roll_back()
    assert shown(kept) == 3


def write_bad(path: Path, **changed: Any) -> None:
    weights = {**weights_of(5), **changed}
    weights = {name: each for name, each in weights.items() if each is not None}
    write(path, 5, 200, weights)


TABLE = "bags.embedding_bags.t.weight"
MORE = "bags.embedding_bags.more.weight"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: write_bad(path, **{TABLE: None}), f"has no '{TABLE}'"),
        (lambda path: write_bad(path, **{TABLE: torch.zeros(5, 3)}), r"shape \[5, 3\]"),
        (lambda path: write_bad(path, **{TABLE: torch.zeros(5, 4).double()}), "float64"),
        (lambda path: write_bad(path, **{TABLE: torch.full((5, 4), nan)}), f"'{TABLE}' has NaN"),
        (lambda path: write_bad(path, **{MORE: torch.zeros(5, 4)}), r"it has tables \['more'\]"),
        (lambda path: write_bad(path, **{"dense.bias": None}), "has no 'dense.bias'"),
    ],
    ids=["no table", "shape", "dtype", "NaN", "more tables", "no dense weight"],
)
def test_bad_ones_change_nothing(
    kept: Keeper,
    folder: Path,
    watched: Watch,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    says: str,
) -> None:
    """The reason is logged once. The checkpoint before it is published, and the bad one itself when
    its files have changed."""
    damage(folder / "bad")
    write(folder / "good", 1, 100)
    with caplog.at_level(logging.WARNING):
        assert watched.look() and shown(kept) == 1
        for _ in range(3):
            assert not watched.look()
    [record] = caplog.records
    assert watched.problem == record.getMessage()
    assert str(folder / "bad") in watched.problem
    assert re.search(says, watched.problem)
    assert watched.failed == 1 and shown(kept) == 1
    shutil.rmtree(folder / "bad")
    write(folder / "bad", 7, 300)
    assert watched.look() and shown(kept) == 7 and watched.problem == ""


def test_a_lack_of_memory_may_pass(
    kept: Keeper, folder: Path, watched: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing about the checkpoint, which is tried again although no file changes."""
    write(folder / "a", 1, 100)
    lacks = [True, True, False]
    publish = kept.publish

    def publish_in_memory(checkpoint: Any, **named: Any) -> Any:
        if lacks.pop(0):
            raise RendezvousError("no memory for both versions")
        return publish(checkpoint, **named)

    monkeypatch.setattr(kept, "publish", publish_in_memory)
    for failed in (1, 2):
        assert not watched.look() and watched.failed == failed
        assert "no memory for both versions" in watched.problem and shown(kept) == 0
    assert watched.look() and watched.problem == "" and shown(kept) == 1


def test_what_is_not_complete_is_left_out(
    kept: Keeper, folder: Path, watched: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "growing").mkdir()
    (folder / ".hidden").mkdir()
    truncated = write(folder / "truncated", 5, 100) / "weights.pt"
    truncated.write_bytes(truncated.read_bytes()[:-100])
    with caplog.at_level(logging.INFO):
        assert not watched.look() and not watched.look()
    said = sorted(record.getMessage() for record in caplog.records)
    assert [text.partition(" is left out: ")[0] for text in said] == [
        str(folder / "growing"),
        str(folder / "truncated"),
    ]
    assert (watched.problem, watched.failed) == ("", 0)
    torch.save(weights_of(4), folder / "growing" / "weights.pt")
    assert watched.look() and shown(kept) == 4


def test_a_directory_that_is_not_there(kept: Keeper, folder: Path, watched: Watch) -> None:
    folder.rmdir()
    assert not watched.look() and "FileNotFoundError" in watched.problem
    folder.mkdir()
    write(folder / "a", 1, 100)
    assert watched.look() and watched.problem == "" and shown(kept) == 1


def test_one_that_is_deleted_while_it_is_read(
    kept: Keeper, folder: Path, watched: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder / "a", 1, 100)
    publish = kept.publish

    def publish_late(checkpoint: Any, **named: Any) -> Any:
        shutil.rmtree(checkpoint)
        return publish(checkpoint, **named)

    monkeypatch.setattr(kept, "publish", publish_late)
    assert not watched.look() and shown(kept) == 0
    assert str(folder / "a") in watched.problem
    assert not watched.look() and watched.problem == ""


@pytest.mark.usefixtures("by_hand")
def test_a_successor_knows_what_serves(folder: Path, tmp_path: Path) -> None:
    """The version's name has the identity, so that nothing is published twice."""
    found = write(folder / "a", 1, 100)
    with keeper(Model, found, tmp_path / "k") as kept, kept.watch(folder) as watched:
        assert not watched.look() and watched.published == []
        assert kept.version == version_of_checkpoint(found)
        write(folder / "b", 2, 50)
        assert not watched.look() and shown(kept) == 1
        write(folder / "c", 3, 101)
        assert watched.look() and shown(kept) == 3


@pytest.mark.usefixtures("by_hand")
def test_a_probe_keeps_a_version_out(kept: Keeper, folder: Path) -> None:
    with kept.watch(folder, probe=[((IDS,), 0.0, 3.0)]) as watched:
        write(folder / "a", 2, 100)
        assert watched.look()
        write(folder / "b", 4, 101)
        assert not watched.look() and "4.0 at [0, 0]" in watched.problem
        assert shown(kept) == 2


def test_a_thread_looks_by_itself(kept: Keeper, folder: Path) -> None:
    write(folder / "a", 1, 100)
    with watch(kept.model, folder, pause=0.005) as watched:
        until(lambda: bool(watched.published))
        assert shown(kept) == 1
    assert not watched._thread.is_alive()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"keep": 0}, "keep is 0, but must be at least 1"),
        ({"keep": True}, "keep is True"),
        ({"pause": 0.0}, "pause is 0.0 s"),
        ({"pause": float("nan")}, "pause is nan s"),
        ({"probe": []}, "probe is"),
        ({"deadline": -1.0}, "deadline"),
    ],
)
def test_what_no_watch_can_have(
    kept: Keeper, folder: Path, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        kept.watch(folder, **arguments)
    with pytest.raises(ValueError, match=says):
        watch(kept.model, folder, **arguments)


@given(
    name=st.text(
        st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=90
    )
)
def test_any_name_of_a_file_makes_a_version(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("names")
    path = folder / f"{name[:60]}.pt"
    torch.save({"a": torch.zeros(1)}, folder / "made.pt.new")
    (folder / "made.pt.new").rename(path)
    check_version(version_of_checkpoint(path))


@given(numbers=st.lists(st.integers(0, 10**6), min_size=2, max_size=2))
def test_the_order_of_names(numbers: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("names")
    for each in numbers:
        (folder / f"step-{each}").touch()
        os.utime(folder / f"step-{each}", ns=(1, 1))
    paths = [folder / f"step-{each}" for each in numbers]
    assert (order_of(paths[0]) < order_of(paths[1])) == (numbers[0] < numbers[1])


@pytest.mark.usefixtures("by_hand")
def test_a_watch_that_drains_goes_back_to_what_served(kept: Keeper, folder: Path) -> None:
    """Once all have let go, a probe has nothing left that serves on."""
    with kept.watch(folder, probe=[((IDS,), 0.0, 10.0)], drain=True) as watched:
        write(folder / "good", 1, 100)
        assert watched.look() and shown(kept) == 1
        write(folder / "bad", 99, 101)
        assert not watched.look() and "99.0 at [0, 0]" in watched.problem
        assert "The tables are drained already" in watched.problem
        with pytest.raises(DrainedError):
            shown(kept)
        assert watched.look() and shown(kept) == 1
        assert [each.path.name for each in watched.published] == ["good"]
        # What does not pass is not tried again, and drains nothing.
        assert not watched.look() and shown(kept) == 1 and watched.failed == 1


@pytest.mark.usefixtures("by_hand")
def test_a_checkpoint_that_is_not_let_go_for_is_not_tried_again(
    kept: Keeper, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try would take the service away from the readers that let go."""

    def refuse(*_: object, **__: object) -> None:
        raise PeerTimeoutError("process 4711 has not let go")

    monkeypatch.setattr(Keeper, "publish", refuse)
    write(folder / "1", 1, 100)
    for drain, tries in ((True, 1), (False, 2)):
        with kept.watch(folder, drain=drain) as watched:
            watched.look()
            watched.look()
            assert watched.failed == tries
            assert "process 4711" in watched.problem

"""Checkpoints that come one after the other, and answers compared with them."""

import json
import queue
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.serve import model, traffic
from benchmarks.serve.answers import compared
from benchmarks.serve.generator import REQUESTS
from benchmarks.serve.refresh import Writer

pytestmark = pytest.mark.full

ROWS = 20


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate(("v1", "v2")):
        model.write_checkpoint(folder / name, ROWS, seed)
    return {name: folder / name for name in ("v1", "v2")}


def response(version: str, scores: np.ndarray) -> bytes:
    output = {"name": "scores", "datatype": "FP32", "shape": scores.shape}
    head = json.dumps({"model_version": version, "outputs": [output]}).encode()
    lines = f"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: {len(head)}\r\n\r\n"
    return lines.encode() + head + scores.tobytes()


@pytest.mark.parametrize("int8", [False, True])
def test_answers_are_compared_with_the_version_that_they_name(
    checkpoints: dict[str, Path], int8: bool
) -> None:
    sent = list(traffic.requests(3, ROWS))
    scores = {
        name: [model.scores(model.load(path, ROWS, int8), each).numpy() for each in sent]
        for name, path in checkpoints.items()
    }
    kept = [
        (0, response("v1@abc", scores["v1"][0])),
        (1, response("v2@def", scores["v2"][1])),
        (REQUESTS + 2, response("v2@def", scores["v2"][2])),
    ]
    found = compared(kept, checkpoints, ROWS, int8)
    assert (found["answers"], found["wrong"]) == (3, 0)
    assert found["largest_difference"] < 1e-6
    assert found["versions"] == {"v1": 1, "v2": 2}

    bad = [
        (0, response("v1@abc", scores["v2"][0])),  # of another version
        (1, response("v1@abc", scores["v1"][2])),  # of another request
        (2, response("v1@abc", scores["v1"][2] * np.float32(np.nan))),
        (2, response("v1@abc", scores["v1"][2] + np.float32(1e-5))),
    ]
    assert compared([*kept, *bad], checkpoints, ROWS, int8)["wrong"] == 4


def test_an_unknown_version_is_an_error(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"nobody published: \['v9'\]"):
        compared([(0, response("v9@x", np.zeros(1, np.float32)))], checkpoints, ROWS)


def test_a_checkpoint_has_all_weights_and_a_seed_gives_the_same_ones(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    model.write_checkpoint(tmp_path / "again", ROWS, 0)
    first, again, other = (
        model.load(path, ROWS).state_dict()
        for path in (checkpoints["v1"], tmp_path / "again", checkpoints["v2"])
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    tables = [name for name in first if "embedding_bags" in name]
    assert len(tables) == 26
    assert len({first[name].sum().item() for name in tables}) == 26


def test_a_writer_puts_whole_copies_in_turn_and_removes_old_ones(tmp_path: Path) -> None:
    sources = [tmp_path / name for name in ("a", "b", "c")]
    for source in sources:
        source.mkdir()
        (source / "weights").write_text(source.name)
    directory = tmp_path / "watched"
    directory.mkdir()
    told: queue.Queue[tuple[Path, str]] = queue.Queue()
    writer = Writer(
        sources, directory, 0.02, lambda path: told.put((path, (path / "weights").read_text()))
    )
    writer.start()
    found = [told.get(timeout=30) for _ in range(5)]
    writer.end()
    assert [(path.name, text) for path, text in found] == [
        *(("v1", "b"), ("v2", "c"), ("v3", "a"), ("v4", "b"), ("v5", "c")),
    ]
    assert writer.written >= 5
    left = {path.name for path in directory.iterdir()}
    assert left == {f"v{writer.written - age}" for age in range(3)}

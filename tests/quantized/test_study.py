"""The study goes on where it was stopped, and its page says what its record holds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness import record
from benchmarks.quantized import data, trainings
from benchmarks.quantized.cells import BASELINE, CELLS, CONTROL, Cell
from benchmarks.quantized.data import Source
from benchmarks.quantized.page import plot, section, summarize
from benchmarks.quantized.study import train
from benchmarks.quantized.trainings import change
from tests.paths import DATA
from torchrec_bls.datasets import capped_cardinalities

SOURCE = Source("planted", iterations=2, batch_size=32, test_rows=256, table_rows=20)
SETTINGS = {"seeds": 2, "sources": [{"name": "planted", "batch_size": 32}]}


def some_cells() -> list[Cell]:
    wanted = ("fp32", "fp32 ring", "uint2, uint2", "uint2 ring")
    return [cell for cell in CELLS if cell.row in wanted and cell.collectives.nodes <= 32]


TASKS = [(SOURCE, cell, seed) for seed in range(2) for cell in some_cells()]


def opened(path: Path, **settings: int) -> record.Resumable:
    empty = {"environment": record.environment(), "settings": SETTINGS | settings, "results": []}
    return record.Resumable(path, empty, summarize)


Keys = list[tuple[str, int]]


@pytest.fixture(autouse=True)
def _threads_in_place_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))


def trained(path: Path, tasks: list[trainings.Task]) -> Keys:
    """Runs a study and returns what it had to train."""
    keys: Keys = []

    def note(source: Source, cell: Cell, seed: int) -> dict[str, Any]:
        keys.append((cell.key, seed))
        return train(source, cell, seed)

    trainings.run(opened(path), tasks, 1, note)
    return keys


def without_times(path: Path) -> list[dict[str, Any]]:
    results = record.read_raw(record.raw_path(path))["results"]
    for result in results:
        del result["cpu_seconds"]
    return sorted(results, key=lambda result: (result["cell"], result["seed"]))


@pytest.mark.full
def test_a_stopped_study_goes_on(tmp_path: Path) -> None:
    at_once, in_parts = tmp_path / "at-once.json", tmp_path / "in-parts.json"
    keys = [(cell.key, seed) for _, cell, seed in TASKS]
    assert trained(at_once, TASKS) == keys
    assert trained(in_parts, TASKS[:3]) == keys[:3]
    assert trained(in_parts, TASKS) == keys[3:]
    assert without_times(in_parts) == without_times(at_once)
    assert trained(in_parts, TASKS) == []
    with pytest.raises(record.RecordError, match="write to another file"):
        opened(in_parts, seeds=4)


@pytest.mark.full
def test_the_page_says_what_the_record_holds(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    trained(path, TASKS)
    text = section(record.read(path))
    cell = next(cell for cell in some_cells() if cell.row == "uint2 ring")
    results = record.read_raw(record.raw_path(path))["results"]
    changes = [
        100 * (one["accuracy"] / base["accuracy"] - 1)
        for one in results
        for base in results
        if one["cell"] == cell.key and base["cell"] == BASELINE.key and one["seed"] == base["seed"]
    ]
    assert len(changes) == 2
    spread = abs(changes[0] - changes[1]) / np.sqrt(2)
    shown = f"{np.mean(changes):+.3f} ± {spread:.3f}"
    assert f"| uint2 ring | {shown} | -0.936 | - | -1.378 | - | -4.916 |" in text


def test_the_test_sets_error_is_that_of_paired_decisions() -> None:
    """The record has it as a share of the samples, the page in percent of the accuracy."""
    base = {"source": "s", "cell": BASELINE.key, "seed": 0, "accuracy": 0.75, "loss": 0.5}
    cell = CELLS[3]
    result = {"source": "s", "cell": cell.key, "seed": 0, "loss": None, "flipped": 0.01}
    result |= {"difference": -0.003, "test_error": 0.0015}
    delta = change([result], {0: base})
    assert delta["accuracy"] == pytest.approx(-0.4) and delta["error"] == pytest.approx(0.2)
    assert delta["loss"] is None and delta["seeds"] == 1 and delta["spread"] == 0


def test_expected_accuracy_is_near_the_one_on_labels() -> None:
    source = Source("planted", 1, 32, 20_000, 20)
    result = train(source, BASELINE, 0)
    assert result["accuracy"] == pytest.approx(result["accuracy_on_labels"], abs=0.015)
    assert result["accuracy"] <= result["bayes_accuracy"]
    control = train(source, CONTROL, 0)
    assert control["difference"] == pytest.approx(control["accuracy"] - result["accuracy"])


def test_cells_are_the_rows_of_the_paper() -> None:
    assert [sum(cell.table == table for cell in CELLS) for table in (2, 3, 4)] == [7, 24, 18]
    assert len({cell.key for cell in CELLS}) == len(CELLS)
    worst = min(CELLS, key=lambda cell: cell.paper or 0)
    assert (worst.row, worst.paper, worst.collectives.compensated) == (
        "uint2 ring EC",
        -6.32555,
        True,
    )


def test_a_criteo_file_is_split_as_by_days(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    rows = (
        "\t".join([str(row % 2), *["3"] * 13, *[f"{row * 7 + place:x}" for place in range(26)]])
        for row in range(700)
    )
    path.write_text("".join(row + "\n" for row in rows))
    hashed = capped_cardinalities(50)
    whole = data.load(Source("criteo", 1000, 32, 0, 50, path), seed=0)
    assert (len(whole.train), len(whole.test)) == (576, 124)
    assert whole.train.ids[5].tolist() == [(35 + place) % rows for place, rows in enumerate(hashed)]
    start = data.load(Source("criteo", 2, 32, 0, 50, path), seed=0)
    assert (len(start.train), len(start.test)) == (64, 11)
    assert start.test.ids[0].tolist() == whole.train.ids[64].tolist()


@pytest.mark.full
def test_movielens_has_the_shape() -> None:
    folder = DATA / "ml-100k"
    if not folder.is_dir():
        pytest.skip("needs MovieLens 100K in ../shared/data/ml-100k")
    source = Source("ml-100k", 4, 1024, 0, 10_000, folder)
    one, other = (data.load(source, seed) for seed in (0, 1))
    assert one.train.ids.shape == (4096, 26) and len(one.test) == 20_000
    assert 0.5 < one.train.labels.mean() < 0.6
    assert one.test.ids.tobytes() == other.test.ids.tobytes()
    assert one.train.ids.tobytes() != other.train.ids.tobytes()
    assert one.rows_per_table[:2] <= [943, 1682] and one.train.ids.min() == 0


@pytest.mark.full
def test_section_and_plot_of_an_unfinished_record(tmp_path: Path) -> None:
    raw = {
        "environment": {
            "cpu": "Some CPU",
            "cores": 2,
            "commit": "abc",
            "date": "2026-01-02",
            "command": "python x",
            "kernel": "6",
            "load_average": 0.1,
            "versions": {"torch": "2"},
        },
        "settings": SETTINGS,
        "results": [train(SOURCE, BASELINE, 0)],
    }
    summary = summarize(raw)
    text = section(summary)
    assert "### planted" in text and "Table 2" not in text
    plot(tmp_path / "figure.png", summary)

"""The study of error bounds: the paper's numbers, sizes of other compressors, and what arrives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.bounded import frames, lookups, paper, sizes, study
from benchmarks.bounded.cells import BASELINE, CELLS, LOOKUPS
from benchmarks.bounded.page import interval, plot, section, summarize, verdict
from benchmarks.harness import record
from benchmarks.quantized.data import Source
from tests.codecs.bounded import reference
from tests.codecs.bounded.frames import HEAD_BYTES
from torchrec_bls.codecs.error_bound import bound_at
from torchrec_bls.datasets.criteo_shape import KAGGLE_CARDINALITIES

SOURCE = Source("planted", iterations=4, batch_size=16, test_rows=300, table_rows=40)


def test_the_papers_numbers_show_its_errors() -> None:
    text = " ".join(paper.errors().split())
    for shown in (
        "16 of 16 indices",
        "25 of 26 classes of Kaggle and 26 of 26 of Terabyte",
        "equation 2 gives 4.34 and 5.62 times",
        "it would give 4.82 and 5.93 times",
        "In 51 of 52 cells",
        "Equation 2 chooses another ratio in 7",
        "3.89 and 5.23 times for Terabyte",
        "With 31.3 % of the step it is 1.36 times",
        "10^-97 times",
        "8.6 times as 1.38 times end to end",
        "5.03% of the step",
        "vector-LZ 5.73 / 12.50, Huffman 10.45 / 12.06, hybrid 11.19 / 19.89",
    ):
        assert shown in text
    assert paper.speed_up(4.0, (8.0, 8.0), 1.0) == 2.0


def test_classes() -> None:
    rows = [19, 20, 49_999, 50_000]
    assert paper.classes_by_size(rows) == "LMMS"
    assert paper.classes_by_eta([0.0, 0.01, 0.05, 0.06], (0.01, 0.05)) == "LMMS"
    (one,) = (cell for cell in CELLS if cell.key == "by size, 3x dropped")
    bounds = one.bounds(rows, "", 10)
    at_first, at_last = ([bound_at(bound, i) for bound in bounds] for i in (4, 5))
    assert at_first == pytest.approx([0.15, 0.09, 0.09, 0.03])
    assert at_last == pytest.approx([0.05, 0.03, 0.03, 0.01])


def test_what_arrives_is_what_numpy_decodes() -> None:
    random = np.random.default_rng(0)
    values = random.normal(0, 0.2, (70, 3, 16)).astype(np.float32)
    values[:, 1] *= 40  # of which some need 16 bits
    values[3, 0, 5], values[4, 2, 0] = np.nan, 1e9
    values[10:40] = values[10]
    bounds = [0.003, 0.01, 0.3]
    arrived, size = frames.round_trip(torch.from_numpy(values), bounds)
    parts = [reference.encode(values[:, t].copy(), bound) for t, bound in enumerate(bounds)]
    assert size == HEAD_BYTES + 2 + sum(map(len, parts))
    for table, (part, bound) in enumerate(zip(parts, bounds, strict=True)):
        expected = reference.decode(part, (70, 16), bound)
        assert arrived[:, table].numpy().tobytes() == expected.tobytes()
        # Value by value, whatever else is in the message.
        alone, _ = frames.round_trip(
            torch.from_numpy(values[20:21, table : table + 1].copy()), [bound]
        )
        if table != 1:
            assert alone[0, 0].numpy().tobytes() == expected[20].tobytes()


def test_groups_are_equal_ids() -> None:
    ids = np.array([[7, 1], [3, 1], [7, 0], [5, 1]])
    assert frames.groups_of(ids).tolist() == [[0, 1, 0, 2], [0, 0, 1, 0]]
    embeddings = torch.arange(16.0).view(8, 1, 2)[ids].view(4, 2, 2) / 100
    known = sizes.ours(embeddings, ids, [0.01, 0.01])
    for table, (of_table, groups) in enumerate(zip(known, frames.groups_of(ids), strict=True)):
        rows = embeddings[:, table].numpy().copy()
        assert of_table["ours"] == 1 + len(reference.encode(rows, 0.01))
        assert of_table["with ids"] == 1 + len(reference.encode(rows, 0.01, groups.tolist()))
        assert of_table["fixed width"] >= of_table["with ids"]


def test_sizes_of_other_compressors() -> None:
    codes = np.array([[1, 2], [3, 2], [1, 2], [1, 2], [3, 2]])
    assert sizes.vector_lz(codes, (1, 2, 3)) == [5 + new * 2 for new in (4, 3, 2)]
    assert sizes.vector_lz(100 * codes, (3,)) == [5 + 2 * 2 * 2]
    # 5 twos of one bit, 3 ones and 2 threes of two: 15 bits.
    assert sizes.huffman(codes) == 2 + 2 * 3
    assert sizes.huffman(np.ones((8, 4), int)) == 4 + 2
    shares = np.array(list(Counter(codes.ravel().tolist()).values())) / 10
    assert sizes.entropy(codes) == pytest.approx(-(shares * np.log2(shares)).sum())
    assert sizes.lorenzo(codes).tolist() == [[1, 1], [2, -2], [-2, 2], [0, 0], [2, -2]]
    assert sizes.distinct(codes) == 2 and sizes.distinct(sizes.lorenzo(codes)) == 4
    assert sizes.quantized(np.array([0.0149, 0.0151, -0.031]), 0.01).tolist() == [1, 1, -2]
    table = torch.tensor([[[0.5]], [[0.501]], [[0.7]]])
    assert lookups.etas(table, 0.01) == [pytest.approx(1 / 3)]


def test_intervals_and_what_they_exclude() -> None:
    delta = {"accuracy": -0.01, "seed_error": 0.1, "test_error": 0.0, "seeds": 5}
    low, high = interval(delta)
    assert (low, high) == pytest.approx((-0.2876, 0.2676), abs=1e-4)  # t of 4 degrees: 2.776
    assert verdict(low, high, 5) == "falls of more than 0.288 %"
    assert verdict(-0.019, 0.005, 64) == "**within 0.02 %**"
    assert verdict(-0.019, 0.005, 4) == "falls of more than 0.019 %"
    assert verdict(-0.3, -0.1, 8).startswith("**falls**")
    assert verdict(0.01, 0.03, 4) == "falls of more than 0.000 %"


@pytest.mark.full
def test_the_page_of_a_small_study(tmp_path: Path) -> None:
    tasks = [(SOURCE, cell, seed) for seed in range(2) for cell in (BASELINE, *CELLS[4:9:4])]
    results = [study.work(*task) for task in [(SOURCE, LOOKUPS, 0), *tasks]]
    raw: dict[str, Any] = {"environment": record.environment(), "results": results}
    raw["settings"] = {
        "dim": 32,
        "etas": [0.01, 0.05],
        "sources": [{"name": "planted", "batch_size": 16}],
    }
    path = tmp_path / "record.json"
    record.write_summary(path, summarize(raw))
    summary = record.read(path)
    plot(tmp_path / "figure.png", summary)
    text = section(summary)
    of_lookups, first = results[0]["batches"]["128"], results[1]
    ratios = [sum(of_lookups["fp32"]) / sum(of_lookups[name]) for name in ("window 255", "ours")]
    assert all(f"{ratio:.1f} / " in text for ratio in ratios)
    assert f"`{paper.classes_by_size([min(40, rows) for rows in KAGGLE_CARDINALITIES])}`" in text
    assert "4 iterations of 16 samples, 300 samples to test on, 2 seeds" in text
    assert first["ratio"] == 1.0
    assert all(e["ratio"] > 2 for e in results if e["cell"] in ("0.02", "by eta"))

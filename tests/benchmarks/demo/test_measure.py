"""The demo's data flow with real ranks: batches, sharding, comparison, collected results."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dlrm import build_model

from benchmarks.demo.bounded_lag import bounded_lag
from benchmarks.demo.measure import MEASURED, Expected, compare, measure
from benchmarks.demo.settings import Settings, draw_delays, load_batches
from benchmarks.demo.steps import RankTimes
from benchmarks.demo.summary import summarize, wrong_results
from benchmarks.demo.variants import Variant, torchrec_on_gloo
from tests.paths import DATA
from torchrec_bls.processes import run

ROWS = DATA / "criteo-tiny" / "train.csv"
SETTINGS = Settings(
    data=None,
    ranks=2,
    bounds=(0, 1),
    steps=7,
    runs=2,
    batch=6,
    max_delay=0.001,
    embedding_dim=8,
    seed=3,
)


def unsharded(bound: int, settings: Settings) -> Variant:
    """The model before sharding: shows that the shards got its weights."""
    model = build_model(settings.rows_per_table, settings.embedding_dim, settings.seed)
    return replace(
        torchrec_on_gloo(),
        name="unsharded",
        bound=bound,
        start=lambda _: lambda batches: model(next(batches)),
    )


def make_variants(settings: Settings) -> list[Variant]:
    return [
        torchrec_on_gloo(),
        *(bounded_lag(bound, settings.batch) for bound in settings.bounds),
        unsharded(9, settings),
    ]


@pytest.mark.slow
def test_ranks_measure_compare_and_collect(tmp_path: Path) -> None:
    settings = replace(SETTINGS, max_delay=0.05, straggler=1)
    run(settings.ranks, measure, tmp_path, settings, make_variants, deadline_s=120)
    lines = [summarize(entry) for entry in json.loads((tmp_path / MEASURED).read_text())]
    assert [line.name for line in lines] == ["TorchRec on gloo", "bound 0", "bound 1", "unsharded"]
    assert wrong_results(lines) == []
    assert [line.pulled for line in lines] == [0, 0, 0, 0]
    assert 0 < lines[1].ring_bytes < lines[2].ring_bytes
    assert 0 < (lines[2].wait_share or 0) < 1
    # A few steps: too few to name rank 1.
    least = [line.waiting and line.waiting.waited_least for line in lines]
    assert [each and each.rank for each in least] == [None, 1, 1, None]
    assert all(
        line.step_ms > 0 and line.answer_ms > 0 and line.max_difference == 0 for line in lines
    )


@pytest.mark.parametrize("ranks", [1, 3])
def test_real_rows_are_read_again_when_the_steps_need_more(ranks: int) -> None:
    if not ROWS.exists():
        pytest.skip("needs the Criteo sample ../shared/data/criteo-tiny/train.csv")
    settings = replace(SETTINGS, data=ROWS, ranks=ranks, batch=300, steps=9)
    everyone = [load_batches(settings, rank) for rank in range(ranks)]
    per_pass = -(-1999 // (300 * ranks))
    for batches in everyone:
        assert len(batches) == 9
        assert torch.equal(batches[0].labels, batches[per_pass].labels)
    rows = sum(len(batch.labels) for batches in everyone for batch in batches[:per_pass])
    assert rows == 1999


def test_delays_are_drawn_once() -> None:
    delays = draw_delays(replace(SETTINGS, ranks=4, steps=1000))
    assert delays.shape == (4, 1000)
    assert delays.min() >= 0
    assert delays.max() < 0.001
    assert np.array_equal(delays, draw_delays(replace(SETTINGS, ranks=4, steps=1000)))
    assert len(np.unique(delays)) == delays.size
    doubled = draw_delays(replace(SETTINGS, ranks=4, steps=1000, straggler=2))
    assert np.array_equal(doubled, delays * [[1], [1], [2], [1]])


@pytest.mark.parametrize("wrong", [1.0000001, float("nan")])
def test_one_wrong_logit_is_noticed(wrong: float) -> None:
    right = [torch.ones(2, 1), torch.ones(2, 1)]
    off = [torch.ones(2, 1), torch.tensor([[1.0], [wrong]])]
    times = [RankTimes(0.0, 1.0, [0.0], [1.0], 0.0, [1.0])] * 2
    expected = Expected(torchrec=right, first_bound=right)
    good = compare(times, [right, right], [], expected)
    assert good.equals_torchrec
    assert good.equals_first_bound
    bad = compare(times, [right, off], [], expected)
    assert not bad.equals_torchrec
    assert not bad.equals_first_bound

"""The straggler report: its criterion on simulated runs, its sums and texts, and real ranks."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchrec.datasets.utils import Batch

from benchmarks.demo.settings import Settings, draw_delays
from tests.distributed.dlrm import make_batch, make_dlrm
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BoundedLagPipeline,
    ChannelStats,
    bounded_lag_channels,
)
from torchrec_bls.observe import StragglerReport, gather_report, load_report, save_stats
from torchrec_bls.observe.slowest import Slowest

STATS = ChannelStats(
    messages=0,
    bytes=0,
    pulled_messages=0,
    largest_message=0,
    wait_seconds=[0.0, 0.0],
    lag_histogram=[1],
    slot_bytes=0,
    ring_bytes=0,
    seconds=0.0,
)
DELAYS = Settings(
    data=None,
    ranks=3,
    bounds=(),
    steps=30,
    runs=1,
    batch=1,
    max_delay=0.01,
    embedding_dim=1,
    seed=0,
)


def simulate(delays: np.ndarray, bound: int, work: float = 0.0) -> StragglerReport:
    """Plays a pipeline's two exchanges with a free network, peers waited for in a channel's order.

    Args:
        delays: (ranks, steps), before the ids of a step are posted.
        bound: of both exchanges.
        work: between an exchange and the next.
    """
    ranks, steps = delays.shape
    waited = np.zeros((ranks, ranks))
    ids, embeddings = np.zeros((2, ranks, steps))
    now = np.zeros(ranks)

    def wait(posted: np.ndarray) -> None:
        for rank in range(ranks):
            for peer in ((rank - step) % ranks for step in range(1, ranks)):
                late = max(0.0, posted[peer] - now[rank])
                waited[rank, peer] += late
                now[rank] += late

    for step in range(steps + 2 * bound):
        if step < steps:
            now += delays[:, step]
            ids[:, step] = now
        if bound <= step < steps + bound:
            wait(ids[:, step - bound])
            now += work
            embeddings[:, step - bound] = now
        if step >= 2 * bound:
            wait(embeddings[:, step - 2 * bound])
            now += work
    return StragglerReport(waited.tolist(), [[1]] * ranks, float(now.mean()), steps)


@pytest.mark.parametrize("bound", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("ranks", slow_but([2, 4], [2, 3, 4, 8]))
def test_a_rank_of_twice_the_delay_is_named(ranks: int, bound: int) -> None:
    for seed in range(20):
        settings = replace(DELAYS, ranks=ranks, seed=seed, straggler=seed % ranks, steps=200)
        report = simulate(draw_delays(settings), bound, work=0.001)
        assert report.slowest == settings.straggler
        assert report.share > 0.3


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_the_slower_of_two_late_ranks_is_named(bound: int) -> None:
    """Rank 2 is nearly as late as rank 1, and looked at first: it gets the blame by peer."""
    delays = np.ones((4, 100)) * [[1], [10], [9], [1]]
    report = simulate(delays, bound)
    blamed = np.array(report.wait_seconds).sum(axis=0)
    if bound == 0:
        assert blamed.argmax() == 2
    assert report.waited_least is not None and report.waited_least.rank == 1
    # Were it as fast as rank 2, steps would take 9 in place of 10 (exactly so at bound 0).
    assert report.waited_least.gain == pytest.approx(0.1, abs=0.03)
    # Rank 1 at 9 a step would save each of the others 1 of the 9, 1 and 9 that they wait.
    assert report.share == pytest.approx(3 / 19, abs=0.05)


def test_ranks_alike_have_no_straggler_worth_the_name() -> None:
    report = simulate(draw_delays(replace(DELAYS, ranks=4, steps=3000)), 0)
    assert report.share < 0.05
    assert report.slowest is None


@pytest.mark.parametrize("bound", [0, 2, 8])
@pytest.mark.parametrize("steps", [20, 100, 300])
def test_no_rank_is_named_where_nobody_is_late(steps: int, bound: int) -> None:
    for seed in range(20):
        settings = replace(DELAYS, ranks=2 + seed % 3, seed=seed, steps=steps)
        report = simulate(draw_delays(settings), bound, work=0.001)
        assert report.slowest is None, report
        assert str(report).startswith("no rank ")


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_no_rank_is_named_where_all_are_late_in_turn(ranks: int, bound: int) -> None:
    steps = np.arange(60)
    delays = np.stack([0.02 * ((steps + rank) % ranks == 0) for rank in range(ranks)])
    assert simulate(delays, bound, work=0.001).slowest is None


def test_waiting_that_hardly_lengthens_the_run_names_nobody() -> None:
    """All of the waiting is for rank 0, and it is 1 % of the run."""
    report = StragglerReport([[0.0, 0.0], [0.1, 0.0]], [[1]] * 2, seconds=10.0, steps=100_000)
    assert (report.share, report.slowest) == (1.0, None)
    assert replace(report, seconds=1.0).slowest == 0


def test_few_steps_name_nobody_whom_chance_may_have_made_late() -> None:
    report = StragglerReport([[0.0, 0.0], [1.0, 0.0]], [[1]] * 2, seconds=10.0, steps=100)
    assert report.slowest is None
    assert replace(report, steps=500).slowest == 0


def stats(wait_seconds: list[float], lag_histogram: list[int]) -> ChannelStats:
    return replace(STATS, wait_seconds=wait_seconds, lag_histogram=lag_histogram, seconds=8.0)


TWO_CHANNELS = [
    [stats([0.0, 2.0, 4.0], [8, 0]), stats([0.0, 0.0, 1.0], [4])],
    [stats([1.0, 0.0, 2.0], [6, 2]), stats([0.0, 0.0, 2.0], [4])],
    [stats([0.25, 0.5, 0.0], [8, 0]), stats([0.0, 0.25, 0.0], [4])],
]


def test_channels_are_added_up() -> None:
    report = StragglerReport.of(TWO_CHANNELS)
    assert report.wait_seconds == [[0, 2, 5], [1, 0, 4], [0.25, 0.75, 0]]
    assert report.lag_histogram == [[12, 0], [10, 2], [12, 0]]
    assert report.waited == [7, 5, 1]
    assert (report.seconds, report.steps) == (8.0, 4)
    # 4 of 8 seconds, and chance might make as much of four steps.
    assert report.waited_least == Slowest(rank=2, gain=0.5, needed=1.0)
    assert report.slowest is None
    assert replace(report, steps=16).slowest == 2
    assert report.share == pytest.approx(2 * 4 / 13)


def test_text_and_json_say_the_same() -> None:
    report = replace(StragglerReport.of(TWO_CHANNELS), steps=100)
    assert str(report).splitlines() == [
        "rank 2 holds the others up: it waited least, and were it as fast as the next, steps would "
        "be 50% shorter;",
        "in 100 steps and 8.000 s it waited 1.000 s, the others 6.000 s on average",
        "",
        "seconds waited, and for whom",
        "rank      all   rank 0   rank 1   rank 2",
        "   0    7.000        -    2.000    5.000",
        "   1    5.000    1.000        -    4.000",
        "   2    1.000    0.250    0.750        -",
        "",
        "iterations ahead of a peer when waiting, % of the times",
        "rank      0      1",
        "   0  100.0    0.0",
        "   1   83.3   16.7",
        "   2  100.0    0.0",
    ]
    assert json.loads(json.dumps(report.to_json())) == {
        "slowest": 2,
        "waited_least": {"rank": 2, "gain": 0.5, "needed": 0.2},
        "share": report.share,
        "waited": [7, 5, 1],
        "wait_seconds": report.wait_seconds,
        "lag_histogram": report.lag_histogram,
        "seconds": 8.0,
        "steps": 100,
    }


@pytest.mark.parametrize("channels", [[[]], [[stats([0.0], [0])]], [[STATS]] * 2])
def test_without_waiting_nobody_is_named(channels: list[list[ChannelStats]]) -> None:
    report = StragglerReport.of(channels)
    assert report.slowest is None
    assert report.share == 0
    assert str(report).startswith("no rank waited for another\n")


def test_statistics_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the ranks have \[1, 2\] channels"):
        StragglerReport.of([[STATS], [STATS, STATS]])
    with pytest.raises(ValueError, match=r"of 1 ranks, but channels of \[2\] ranks"):
        StragglerReport.of([[STATS]])


def test_files_of_all_ranks_give_the_report(tmp_path: Path) -> None:
    paths = [tmp_path / f"{rank}.json" for rank in range(3)]
    for rank, path in enumerate(paths):
        save_stats(path, rank, TWO_CHANNELS[rank])
    assert load_report(reversed(paths)) == StragglerReport.of(TWO_CHANNELS)
    with pytest.raises(ValueError, match=r"of ranks \[1, 2\]"):
        load_report(paths[1:])
    with pytest.raises(ValueError, match=r"of ranks \[0, 1, 1\]"):
        load_report([*paths[:2], paths[1]])


def test_statistics_since_earlier_ones() -> None:
    before = ChannelStats(2, 10, 1, 7, [0.0, 1.0], [1, 1], 8, 9, 4.0)
    now = ChannelStats(5, 30, 1, 12, [0.0, 3.5], [2, 4], 8, 9, 6.5)
    assert now.since(before) == ChannelStats(3, 20, 0, 12, [0.0, 2.5], [1, 3], 8, 9, 2.5)


def run_with_delays(rank: int, bound: int, delays: list[list[float]]) -> dict[str, Any]:
    """Runs a sharded DLRM after a warm-up, late before each batch; returns everyone's report."""

    def load(sleeps: list[float]) -> Iterator[Batch]:
        for step, seconds in enumerate(sleeps):
            time.sleep(seconds)
            yield make_batch(rank, step)

    def drain(batches: Iterator[Batch]) -> None:
        while True:
            try:
                pipeline.progress(batches)
            except StopIteration:
                return

    model = make_dlrm(BLSEmbeddingBagCollectionSharder(config=BLSConfig(bound=bound, deadline=30)))
    pipeline = BoundedLagPipeline[Batch, Any](model)
    drain(load([0.0] * 3))
    channels = bounded_lag_channels(model)
    before = [channel.stats() for channel in channels]
    drain(load(delays[rank]))
    done = [
        channel.stats().since(earlier) for channel, earlier in zip(channels, before, strict=True)
    ]
    return asdict(gather_report(done))


@pytest.mark.parametrize(
    ("ranks", "bound", "straggler", "seed"),
    slow_but(
        [(2, 4, 0, 6)],
        [
            (2, 0, 1, 1),
            (3, 0, 0, 2),
            (4, 0, 2, 3),
            (3, 2, 1, 4),
            (4, 2, 3, 5),
            (2, 4, 0, 6),
            (4, 4, 1, 7),
        ],
    ),
)
def test_real_ranks_name_the_one_with_the_demos_delays_doubled(
    ranks: int, bound: int, straggler: int, seed: int
) -> None:
    # Long ones: on a busy machine a rank without a core is slow, too.
    settings = replace(DELAYS, ranks=ranks, straggler=straggler, seed=seed, max_delay=0.04)
    found = run(ranks, run_with_delays, bound, draw_delays(settings).tolist())
    assert all(one == found[0] for one in found)
    report = StragglerReport(**found[0])
    # Thirty steps are too few to tell it from chance.
    assert report.waited_least is not None and report.waited_least.rank == straggler, str(report)
    # The others get ahead, by up to the bound; two channels of each of three sharding types, which
    # say at the end that there are no more batches.
    steps = 30 + 1 + bound
    assert all(sum(histogram) == 6 * steps * (ranks - 1) for histogram in report.lag_histogram)
    assert all(len(histogram) == bound + 1 for histogram in report.lag_histogram)

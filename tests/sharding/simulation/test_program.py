"""Steps of whole jobs: cases by hand, the ideal recurrence, and what must hold of any job."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec_bls.sharding.simulation.engine.timeline import Timeline, simulate
from torchrec_bls.sharding.simulation.program import Ranks, graph_of

from torchrec_bls.observe import ideal_finish_times
from torchrec_bls.rank_steps import (
    Begin,
    Exchange,
    Messages,
    Op,
    PlannedCollective,
    Wait,
    Work,
)

_ROWS, _SUM = Exchange("rows"), Exchange("sum")
_DURATIONS = st.integers(0, 80).map(lambda eighths: eighths / 8)


def _times(ranks: int, steps: int) -> Any:
    column = st.lists(_DURATIONS, min_size=steps, max_size=steps)
    return st.lists(column, min_size=ranks, max_size=ranks).map(np.array)


def _alone(ranks: int) -> Ranks:
    return Ranks.on_hosts(ranks, per_host=ranks, cores=2 * ranks)


def _one_exchange(before: Any, after: Any, bound: int) -> list[Op]:
    return [
        Work(before, "before"),
        Begin(_ROWS, Messages(), work_us=0.0),
        Wait(_ROWS, lag=bound),
        Work(after, "after", lag=bound),
    ]


def _ends_of_batches(timeline: Timeline, name: str, ranks: int) -> np.ndarray:
    """Returns (ranks, batches), when a stage was done with each."""
    return timeline.end[timeline.graph.called(name)].reshape(-1, ranks).T


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 4), st.integers(1, 8), st.integers(0, 4))
def test_free_exchanges_are_the_ideal_recurrence(
    data: Any, ranks: int, steps: int, bound: int
) -> None:
    before, after = data.draw(_times(ranks, steps)), data.draw(_times(ranks, steps))
    timeline = simulate(graph_of(_one_exchange(before, after, bound), _alone(ranks), steps))
    # There, step t has what follows the exchange of step t - k; and waits for nobody before step k.
    shifted = np.concatenate([np.zeros((ranks, bound)), after], axis=1)
    padded = np.concatenate([before, np.zeros((ranks, bound))], axis=1)
    ideal = ideal_finish_times(padded, bound, shifted)[:, bound:]
    np.testing.assert_allclose(_ends_of_batches(timeline, "after", ranks), ideal, atol=1e-9)


@settings(deadline=None, max_examples=30)
@given(st.data(), st.integers(1, 4), st.integers(1, 8))
def test_without_lag_the_slowest_rank_of_each_step_counts(
    data: Any, ranks: int, steps: int
) -> None:
    work = data.draw(_times(ranks, steps))
    timeline = simulate(graph_of(_one_exchange(work, 0.0, 0), _alone(ranks), steps))
    assert timeline.end.max() == pytest.approx(work.max(axis=0).sum())


@settings(deadline=None, max_examples=30)
@given(st.data(), st.integers(1, 4), st.integers(1, 8))
def test_more_lag_is_never_slower_with_a_core_each(data: Any, ranks: int, steps: int) -> None:
    before, after = data.draw(_times(ranks, steps)), data.draw(_times(ranks, steps))
    ends = [
        simulate(graph_of(_one_exchange(before, after, bound), _alone(ranks), steps)).end.max()
        for bound in range(5)
    ]
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(ends))


@settings(deadline=None, max_examples=30)
@given(st.data(), st.integers(2, 4), st.integers(1, 10), st.integers(0, 3))
def test_twice_as_many_slots_as_may_be_under_way_are_never_waited_for(
    data: Any, ranks: int, steps: int, bound: int
) -> None:
    """The simulation knows no slots: when a rank posts into one again, all others have read it."""
    before, after = data.draw(_times(ranks, steps)), data.draw(_times(ranks, steps))
    timeline = simulate(graph_of(_one_exchange(before, after, bound), _alone(ranks), steps))
    posted = timeline.start[timeline.graph.called("post rows")].reshape(-1, ranks).T
    read = _ends_of_batches(timeline, "collect rows", ranks)
    slots = 2 * (bound + 1)
    reused = max(steps - slots, 0)
    assert (posted[:, slots:].min(axis=0) >= read[:, :reused].max(axis=0)).all()


@pytest.mark.parametrize("by", [None, Messages(), PlannedCollective(1.0)])
def test_what_nobody_has_begun_is_not_waited_for(by: Messages | PlannedCollective | None) -> None:
    later = [] if by is None else [Begin(_ROWS, by, work_us=0.0)]
    with pytest.raises(ValueError, match="'rows' of batch 0 is waited for in step 0"):
        graph_of([Wait(_ROWS), *later], _alone(2), 4)


def test_a_collective_begins_when_all_are_there_and_overlaps_with_what_follows() -> None:
    program = [
        Work([1.0, 5.0], "before"),
        Begin(_SUM, PlannedCollective(10.0, latency_us=2.0), work_us=1.0, finish_us=1.0),
        Work(7.0, "meanwhile"),
        Wait(_SUM),
    ]
    # Begun at 2 and 6: from 6 to 16 on both, seen at 18; meanwhile until 9 and 13.
    timeline = simulate(graph_of(program, _alone(2), 1))
    assert timeline.end[timeline.graph.called("finish sum")].tolist() == [19.0, 19.0]


def test_collectives_take_cores_from_what_runs_meanwhile() -> None:
    program = [Begin(_SUM, PlannedCollective(10.0), 0.0), Work(10.0, "meanwhile"), Wait(_SUM)]
    two_on_two = Ranks.on_hosts(2, per_host=2, cores=2)
    timeline = simulate(graph_of(program, two_on_two, 1))
    assert timeline.end.max() == pytest.approx(20.0)


def test_while_a_collective_waits_others_have_its_core() -> None:
    rest = [Work(10.0, "meanwhile"), Wait(_SUM)]
    program = [Begin(_SUM, PlannedCollective(10.0, pause_us=30.0), 0.0), *rest]
    one_core = Ranks.on_hosts(2, per_host=2, cores=1)
    # Four threads have ten each until 40; then nobody needs the core, until 70.
    timeline = simulate(graph_of(program, one_core, 1))
    assert timeline.end.max() == pytest.approx(70.0)
    all_work = [Begin(_SUM, PlannedCollective(40.0), 0.0), *rest]
    assert simulate(graph_of(all_work, one_core, 1)).end.max() == pytest.approx(100.0)


def test_pinned_ranks_do_not_share() -> None:
    pinned = Ranks(2, cores=(1, 1), pool=(0, 1))
    timeline = simulate(graph_of([Work([10.0, 4.0])], pinned, 1))
    assert timeline.end.tolist() == [10.0, 4.0]
    together = Ranks.on_hosts(2, per_host=2, cores=1)
    assert simulate(graph_of([Work([10.0, 4.0])], together, 1)).end.max() == 14.0


def _linked(ranks: int, per_host: int, **others: float) -> Ranks:
    return Ranks.on_hosts(ranks, per_host, cores=per_host, link_bytes_per_us=1.0, **others)


def _sent(ranks: Ranks, before: list[float], transfer: float) -> list[float]:
    """Returns when each rank's messages of one exchange have passed the link."""
    post = Begin(_ROWS, Messages(transfer_us=transfer), work_us=0.0)
    program = [Work(before, "before"), post, Wait(_ROWS)]
    timeline = simulate(graph_of(program, ranks, 1))
    return timeline.end[timeline.graph.called("rows on the link")].tolist()


def test_ranks_of_a_host_share_its_link() -> None:
    assert _sent(_linked(4, 2), [0.0] * 4, 100.0) == pytest.approx([200.0] * 4)
    # Rank 0 has the link for itself until 50 and half of it from then on; rank 1 what is left.
    assert _sent(_linked(2, 2), [0.0, 50.0], 100.0) == pytest.approx([150.0, 200.0])
    assert _sent(_linked(2, 1), [0.0, 50.0], 100.0) == pytest.approx([100.0, 150.0])


def test_bytes_on_a_link_neither_spin_nor_wake() -> None:
    sleepy = _linked(2, 2, spin_us=30.0, wake_us=7.0)
    assert _sent(sleepy, [0.0, 50.0], 100.0) == pytest.approx([150.0, 200.0])


def test_a_message_is_read_once_it_has_passed_the_link() -> None:
    messages = Messages(latency_us=2.0, transfer_us=[10.0, 30.0])
    program = [Begin(_ROWS, messages, work_us=1.0, finish_us=5.0), Wait(_ROWS)]
    timeline = simulate(graph_of(program, _linked(2, 1), 1))
    assert timeline.end[timeline.graph.called("collect rows")].tolist() == [38.0, 38.0]


def test_a_collective_ends_once_it_has_passed_the_link() -> None:
    by = PlannedCollective(4.0, latency_us=2.0, transfer_us=[10.0, 30.0])
    program = [Begin(_SUM, by, work_us=1.0), Wait(_SUM)]
    ranks = _linked(2, 1)
    graph = graph_of(program, ranks, 1)
    assert simulate(graph).end[graph.called("finish sum")].tolist() == [37.0, 37.0]
    names = ["main"] * 2 + ["communication"] * 2 + ["link"] * 2
    assert list(graph.machine.threads) == list(zip([0, 1] * 3, names, strict=True))


def test_a_transfer_takes_a_link() -> None:
    with pytest.raises(ValueError, match="a step has a transfer, but ranks have no link"):
        graph_of([Begin(_ROWS, Messages(transfer_us=1.0), 1.0), Wait(_ROWS)], _alone(2), 1)


@pytest.mark.parametrize(
    ("text", "by_bound"),
    [
        ("uniform", [13.0, 10.6, 10.4, 10.3, 10.3, 10.2]),
        ("straggler", [15.0] * 6),
        ("none", [5.0] * 6),
    ],
)
def test_what_lag_is_worth(text: str, by_bound: list[float]) -> None:
    """4 ranks that compute 5 ms a step; lag pays where delays move from rank to rank, and not where
    one rank is slow throughout."""
    steps = 300
    random = np.random.default_rng(1)
    delays = {
        "uniform": random.uniform(0, 10_000, (4, steps)),
        "straggler": np.repeat([[0.0], [0.0], [10_000.0], [0.0]], steps, axis=1),
        "none": np.zeros((4, steps)),
    }[text]
    found = []
    for bound in (0, 1, 2, 4, 8, 16):
        program = [
            Begin(_ROWS, Messages(), work_us=0.0),
            Wait(_ROWS, bound),
            Work(5000.0, "dense", lag=bound),
        ]
        timeline = simulate(graph_of(program, _alone(4), steps, delays))
        found.append(timeline.end.max() / steps / 1000)
    assert found == pytest.approx(by_bound, rel=0.03)

"""Replays against jobs worked out by hand, and against the ideal recurrence."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrec_bls.sharding.simulation.recorded.replay import Replay, replay

from torchrec_bls.observe.ideal_steps import ideal_finish_times
from torchrec_bls.rank_steps import (
    Begin,
    Exchange,
    Messages,
    Op,
    Recording,
    SeenCollective,
    Wait,
    Work,
)

A, B = Exchange("all_to_all 0", "0", 0), Exchange("all_reduce 1", "0", 1)


def recording(*ranks: Sequence[Sequence[Op]], **others: bool | int) -> Recording:
    return Recording(ranks, **others)


def begin(exchange: Exchange, us: float, worker: int = 0, latency_us: float = 0.0) -> Begin:
    """A collective of a rank's worker."""
    return Begin(exchange, SeenCollective(us, f"worker {worker}", latency_us))


def post(exchange: Exchange, reading_us: float) -> Begin:
    """Messages, which the main thread reads."""
    return Begin(exchange, Messages(), finish_us=reading_us)


def run(job: Recording, bound: int = 0, delays: np.ndarray | None = None) -> Replay:
    return replay(job, bound, np.zeros((len(job.ranks), job.steps)) if delays is None else delays)


def ends(done: Replay, name: str) -> list[float]:
    """Returns when tasks of a name end, by thread and step."""
    graph = done.timeline.graph
    tasks = graph.called(name)
    tasks = tasks[np.lexsort((graph.step[tasks], graph.thread[tasks]))]
    return done.timeline.end[tasks].tolist()


def test_a_collective_ends_everywhere_after_the_last_rank_has_come() -> None:
    job = recording(
        *(
            [[Work(us), begin(A, 5), Wait(A), Work(1)] for us in own]
            for own in ([10, 20, 30], [20, 10, 10])
        )
    )
    done = run(job)
    # 20 + 5 + 1, then 20 + 5 + 1, then 30 + 5 + 1: the slower rank of each step.
    assert ends(done, "batch ends") == [26, 52, 88] * 2
    assert done.step_us == pytest.approx(88 / 3)
    threads = list(done.timeline.graph.machine.threads)
    assert threads == [(0, "main"), (1, "main"), (0, "worker 0"), (1, "worker 0")]


def test_work_goes_on_beside_a_collective() -> None:
    step = [Work(10), begin(A, 50, latency_us=2), Work(30), Wait(A), Work(1)]
    late = [Work(100), begin(A, 40), Work(60), Wait(A), Work(1)]
    done = run(recording([step], [late]))
    # Rank 0 waits for 100 + 50; rank 1 is at 160 when its part has ended, at 140.
    assert ends(done, "batch ends") == [151, 161]


def test_a_worker_that_waits_for_one_collective_keeps_others_from_the_next() -> None:
    def step(first: float, worker_of_b: int) -> list[Op]:
        begins = [begin(A, 5), begin(B, 7, worker=worker_of_b)]
        return [begins[0], Work(first), begins[1], Wait(A), Wait(B)]

    # Rank 1 begins A late, by when B waits for its worker as well, or has one of its own.
    late: list[Op] = [Work(100), *step(0, 0)]
    assert ends(run(recording([step(10, 0)], [late])), "batch ends") == [112, 112]
    assert (
        ends(run(recording([step(10, 1)], [[Work(100), *step(0, 1)]])), "batch ends") == [107] * 2
    )


def test_groups_meet_without_the_ranks_that_are_in_others() -> None:
    pairs = Exchange("all_reduce 0", "1", 0)
    in_pair: list[Op] = [Work(10), begin(pairs, 5, worker=1), Wait(pairs)]
    job = recording([in_pair], [in_pair], [[Work(1000)]])
    assert ends(run(job), "batch ends") == [15, 15, 1000]


def test_a_smaller_group_follows_on_workers_of_a_larger_one() -> None:
    pair = Exchange("all_reduce 0", "1", 0)
    ahead: list[Op] = [begin(A, 5), begin(pair, 7), Wait(A), Wait(pair)]
    late: list[Op] = [Work(100), begin(A, 5), Wait(A)]
    assert ends(run(recording([ahead], [ahead], [late])), "batch ends") == [112, 112, 105]


def test_steps_are_replayed_in_turn_and_held_up() -> None:
    job = recording([[Work(10)], [Work(20)]])
    delays = np.array([[1.0, 2.0, 3.0, 4.0, 5.0]])
    assert ends(run(job, delays=delays), "batch ends") == [11, 33, 46, 70, 85]


def test_what_earlier_steps_began_is_waited_for() -> None:
    step: list[Op] = [Wait(A, lag=1), Work(10), begin(A, 100), Work(1)]
    # The first wait is for what began before the recording.
    assert ends(run(recording([step, step])), "batch ends") == [11, 121]


durations = st.integers(0, 1000).map(float)


@given(st.data())
def test_with_free_messages_a_replay_is_the_ideal_recurrence(data: st.DataObject) -> None:
    ranks, batches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    bound = data.draw(st.integers(0, 3))
    row = st.lists(durations, min_size=batches, max_size=batches)
    before = np.array(data.draw(st.lists(row, min_size=ranks, max_size=ranks)))
    job = recording(*([[Work(us), post(A, 0.0), Wait(A)] for us in own] for own in before))
    done = run(job, bound)
    found = np.array(ends(done, "batch ends")).reshape(ranks, batches)
    ideal = ideal_finish_times(before, bound)
    # A batch ends as many steps after it began.
    counted = max(batches - bound, 0)
    np.testing.assert_allclose(found[:, :counted], ideal[:, bound:])


def test_stages_behind_each_wait_are_of_older_batches() -> None:
    # Lookups of 5 between two exchanges: with a bound of 1 the first batch is through in step 2.
    step: list[Op] = [Work(1), post(A, 0), Wait(A), Work(5), post(B, 0), Wait(B), Work(20)]
    assert ends(run(recording([step] * 4)), "batch ends") == [26, 52, 78, 104]
    assert ends(run(recording([step] * 4), 1), "batch ends") == [1 + 6 + 26, 59, 59 + 25, 59 + 45]


def test_both_exchanges_of_a_stage_are_waited_for_in_the_next() -> None:
    step: list[Op] = [post(A, 0), post(B, 0), Work(1), Wait(A), Work(2), Wait(B), Work(4)]
    # Not three stages: the second batch ends in step 2.
    assert ends(run(recording([step] * 2), 1), "batch ends") == [1 + 1 + 6, 8 + 6]


def test_messages_are_read_by_the_main_thread() -> None:
    job = recording([[post(A, 30), Wait(A)]], [[Work(10), post(A, 40), Wait(A)]])
    assert ends(run(job), "batch ends") == [40, 50]


def test_ranks_that_wait_in_a_circle() -> None:
    one: list[Op] = [begin(A, 1), Wait(A), begin(B, 1), Wait(B)]
    other: list[Op] = [begin(B, 1), Wait(B), begin(A, 1), Wait(A)]
    with pytest.raises(
        ValueError, match="in a circle: rank 0 for all_to_all 0, rank 1 for all_reduce 1"
    ):
        run(recording([one], [other]))
    with pytest.raises(ValueError, match=r"all_.* waits for itself"):
        run(recording([one], [other]), 1)


@pytest.mark.parametrize(
    ("others", "bound", "message"),
    [
        ({"trains": True}, 1, "bound is 1, but the recorded job trains"),
        ({"bound": 2}, 0, "recorded at bound 2"),
        ({}, -1, "bound is -1"),
    ],
)
def test_bounds_that_a_job_cannot_have(
    others: dict[str, bool | int], bound: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(recording([[Work(1)]], **others), bound)


def test_training_is_replayed_at_bound_0() -> None:
    assert run(recording([[Work(7)]], trains=True)).step_us == 7


def test_steps_that_wait_for_earlier_ones_have_no_bound() -> None:
    with pytest.raises(ValueError, match="wait for exchanges that earlier steps began"):
        run(recording([[Wait(A, lag=1), post(A, 1)]]), 1)


@pytest.mark.parametrize("shape", [(1, 5), (2, 0), (2,)])
def test_delays_of_other_ranks(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="of 2 ranks and 1 or more batches"):
        run(recording([[Work(1)]], [[Work(1)]]), 0, np.zeros(shape))

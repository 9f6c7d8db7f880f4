"""The ideal under a bound, against cases by hand, an event simulation, and its own laws."""

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from torchrec_bls.observe import ideal_finish_times

shapes = st.tuples(st.integers(1, 4), st.integers(1, 12))
durations = arrays(np.float64, shapes, elements=st.integers(0, 20).map(float))
pairs = shapes.flatmap(
    lambda shape: st.tuples(
        arrays(np.float64, shape, elements=st.integers(0, 20).map(float)),
        arrays(np.float64, shape, elements=st.integers(0, 20).map(float)),
    )
)


def simulate(before: np.ndarray, after: np.ndarray, bound: int) -> np.ndarray:
    """Plays the ranks as events in time: start, post, wake up, finish."""
    ranks, steps = before.shape
    posted = [0] * ranks
    waiting: dict[int, int] = {}
    finish = np.zeros((ranks, steps))
    events = [(before[rank, 0], "post", rank, 0) for rank in range(ranks)]
    heapq.heapify(events)
    while events:
        now, kind, rank, step = heapq.heappop(events)
        if kind == "post":
            posted[rank] = step + 1
            waiting[rank] = step
        else:
            finish[rank, step] = now
            if step + 1 < steps:
                heapq.heappush(events, (now + before[rank, step + 1], "post", rank, step + 1))
        for sleeper, at in list(waiting.items()):
            if min(posted) >= at - bound + 1:
                del waiting[sleeper]
                heapq.heappush(events, (now + after[sleeper, at], "finish", sleeper, at))
    return finish


def test_by_hand() -> None:
    before = [[1, 5, 1], [4, 1, 1]]
    np.testing.assert_array_equal(ideal_finish_times(before, 0), [[4, 9, 10], [4, 9, 10]])
    # In step 2 rank 1 waits for rank 0's post of step 1, which has come by then.
    np.testing.assert_array_equal(ideal_finish_times(before, 1), [[1, 6, 7], [4, 5, 6]])
    slow_first = [[9, 1, 1], [1, 1, 1]]
    np.testing.assert_array_equal(ideal_finish_times(slow_first, 1), [[9, 10, 11], [1, 9, 10]])
    np.testing.assert_array_equal(ideal_finish_times(slow_first, 2), [[9, 10, 11], [1, 2, 9]])


def test_work_after_the_wait_does_not_hold_up_the_peers() -> None:
    # Rank 0 is ready to post at 1 and works 10 after its wait: rank 1 needs only the post.
    finish = ideal_finish_times([[1, 1], [2, 2]], 0, [[10, 0], [0, 0]])
    np.testing.assert_array_equal(finish, [[12, 13], [2, 13]])


@given(pairs, st.integers(0, 14))
def test_equals_the_event_simulation(pair: tuple[np.ndarray, np.ndarray], bound: int) -> None:
    before, after = pair
    expected = simulate(before, after, bound)
    np.testing.assert_array_equal(ideal_finish_times(before, bound, after), expected)


@given(durations)
def test_bound_zero_is_the_sum_of_maxima(before: np.ndarray) -> None:
    finish = ideal_finish_times(before, 0)
    np.testing.assert_array_equal(finish, np.broadcast_to(before.max(0).cumsum(), finish.shape))


@given(pairs)
def test_a_large_bound_is_the_maximum_of_sums(pair: tuple[np.ndarray, np.ndarray]) -> None:
    before, after = pair
    finish = ideal_finish_times(before, before.shape[1], after)
    np.testing.assert_array_equal(finish, (before + after).cumsum(1))
    assert finish[:, -1].max() == (before + after).sum(1).max()


@given(pairs, st.integers(0, 6))
def test_more_lag_is_never_later(pair: tuple[np.ndarray, np.ndarray], bound: int) -> None:
    before, after = pair
    less, more = (ideal_finish_times(before, k, after) for k in (bound, bound + 1))
    assert (more <= less).all()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="bound is -1"):
        ideal_finish_times([[1.0]], -1)
    with pytest.raises(ValueError, match="before_post has durations"):
        ideal_finish_times([[-1.0]], 0)
    with pytest.raises(ValueError, match="after_wait has durations"):
        ideal_finish_times([[1.0]], 0, [[np.nan]])
    with pytest.raises(ValueError, match=r"after_wait has shape \(1, 2\), before_post \(1, 1\)"):
        ideal_finish_times([[1.0]], 0, [[1.0, 2.0]])
    with pytest.raises(ValueError, match=r"expected \(ranks, steps\)"):
        ideal_finish_times([1.0], 0)

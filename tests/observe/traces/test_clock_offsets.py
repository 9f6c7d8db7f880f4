"""Offsets of clocks, from steps whose true times are known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_bls.observe.traces.clock_offsets import UnrelatedClocksError, clock_offsets

_LATENCY_US = 40.0


def steps(
    work_us: np.ndarray,
    offsets_us: np.ndarray,
    seed: int,
    bound: int = 0,
    wake_us: tuple[float, float] = (0.0, 0.0),
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns when ranks sent and received, by their clocks, if they wait for each other as in a
    bounded-lag exchange, and how long they waited; messages take 40 us and now and then more, and
    a rank that waited goes on later by something between the two of `wake_us`."""
    random = np.random.default_rng(seed)
    ranks, count = work_us.shape
    sent, received, waited = (np.zeros((ranks, count)) for _ in range(3))
    now = np.zeros(ranks)
    for step in range(count + bound):
        if step < count:
            now = now + work_us[:, step]
            sent[:, step] = now
        of = step - bound
        if of >= 0:
            takes = _LATENCY_US + random.exponential(5.0, (ranks, ranks))
            arrivals = (sent[:, of] + takes).max(
                axis=1, initial=0, where=~np.eye(ranks, dtype=bool)
            )
            woken = arrivals + random.uniform(*wake_us, ranks)
            waited[:, of] = np.where(arrivals > now, woken - now, 0.0)
            now = np.where(arrivals > now, woken, now)
            received[:, of] = now
    return sent + offsets_us[:, None], received + offsets_us[:, None], waited


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(0, 2))
def test_offsets_of_50_ms_are_found_to_100_us(seed: int, ranks: int, bound: int) -> None:
    random = np.random.default_rng(seed)
    offsets = random.uniform(-50_000, 50_000, ranks)
    work = random.uniform(1_000, 6_000, (ranks, 300))
    found = clock_offsets(*steps(work, offsets, seed, bound)[:2])
    assert np.abs(found - (offsets - offsets[0])).max() < 100


@pytest.mark.parametrize("slow", range(4))
def test_a_rank_that_is_always_last_says_where_the_others_are(slow: int) -> None:
    random = np.random.default_rng(slow)
    offsets = random.uniform(-50_000, 50_000, 4)
    work = random.uniform(1_000, 2_000, (4, 200))
    work[slow] += 3_000
    found = clock_offsets(*steps(work, offsets, seed=1)[:2])
    assert np.abs(found - (offsets - offsets[0])).max() < 100


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10_000), st.integers(2, 6))
def test_few_steps_on_shared_cores_are_enough_where_waits_are_known(seed: int, ranks: int) -> None:
    """Ranks without a core of their own go on up to a millisecond late, and nothing is known better
    than that; without their waits nothing might be known at all."""
    random = np.random.default_rng(seed)
    offsets = random.uniform(-50_000, 50_000, ranks)
    work = random.uniform(1_000, 3_000, (ranks, 20))
    work[seed % ranks] += 20_000
    found = clock_offsets(*steps(work, offsets, seed, wake_us=(30.0, 1_000.0)))
    assert np.abs(found - (offsets - offsets[0])).max() < 1_100


def test_equal_clocks() -> None:
    work = np.random.default_rng(1).uniform(1_000, 6_000, (4, 100))
    assert np.abs(clock_offsets(*steps(work, np.zeros(4), seed=1)[:2])).max() < 100


def test_ranks_that_never_waited() -> None:
    # Far more lag than steps: everybody received long after the last one sent.
    sent = np.random.default_rng(1).uniform(0, 1e6, (2, 4))
    with pytest.raises(UnrelatedClocksError, match=r"ranks \[1\] never waited"):
        clock_offsets(sent, sent + np.random.default_rng(2).uniform(1e6, 9e6, (2, 4)))


@pytest.mark.parametrize(
    ("sent", "received", "message"),
    [
        ([1.0], [1.0], "expected"),
        ([[1.0, 2.0]], [[1.0]], "expected"),
        (np.zeros((0, 3)), np.zeros((0, 3)), "expected"),
        ([[np.nan]], [[1.0]], "no numbers"),
    ],
)
def test_times_that_are_none(sent: object, received: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clock_offsets(sent, received)  # type: ignore[arg-type]

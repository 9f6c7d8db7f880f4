"""Recorded jobs whose exchanges are moved to channels, worked out by hand."""

import numpy as np
import pytest
from torchrec_bls.sharding.simulation.recorded.over_channels import over_channels
from torchrec_bls.sharding.simulation.recorded.replay import replay

from tests.sharding.additive_costs import AdditiveTestCosts
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

COSTS = AdditiveTestCosts()
A, B = Exchange("all_to_all 0", "0", 0), Exchange("all_reduce 1", "0", 1)


def step(us: float, sent: float | None) -> list[Op]:
    """A step of two exchanges, which took 500 and 700 us over gloo."""
    ids = Begin(A, SeenCollective(500, "worker 0", latency_us=9, sent_bytes=sent))
    rows = Begin(B, SeenCollective(700, "worker 0", latency_us=9, sent_bytes=4000))
    return [Work(us), ids, Wait(A), Work(10), rows, Wait(B), Work(1)]


def recording(*ranks: list[list[Op]]) -> Recording:
    return Recording(ranks)


def test_exchanges_take_what_channels_do_for_their_mean_bytes() -> None:
    job = over_channels(recording([step(100, 1000)], [step(40, 3000)]), COSTS)
    us = {begin.exchange: begin.finish_us for begin in job.ranks[1][0] if isinstance(begin, Begin)}
    assert us == {
        A: COSTS.all_to_all([2000.0] * 2, [2000.0] * 2, "bls").microseconds,
        B: COSTS.all_to_all([4000.0] * 2, [4000.0] * 2, "bls").microseconds,
    }
    done = replay(job, 0, np.zeros((2, 1)))
    # The later rank's ids, what reading takes, the lookup, rows, what reading takes, the rest.
    assert done.step_us == pytest.approx(100 + us[A] + 10 + us[B] + 1)
    assert list(done.timeline.graph.machine.threads) == [(0, "main"), (1, "main")]


def test_bytes_count_step_by_step() -> None:
    job = over_channels(recording([step(100, 1000), step(100, 9000)], [step(40, 1000)] * 2), COSTS)
    first, second = (own[1].finish_us for own in job.ranks[0] if isinstance(own[1], Begin))
    assert second > first == COSTS.all_to_all([1000.0] * 2, [1000.0] * 2, "bls").microseconds


def test_recordings_that_need_no_profile_or_fit_none() -> None:
    message = "how many bytes all_to_all 0 of process group '0' sent was not recorded: record the"
    with pytest.raises(ValueError, match=message):
        over_channels(recording([step(1, 1000)], [step(1, None)]), COSTS)
    of_channels: list[Op] = [Begin(A, Messages(), finish_us=5), Wait(A)]
    with pytest.raises(ValueError, match="recorded over bounded-lag channels: its exchanges take"):
        over_channels(recording([of_channels]), COSTS)

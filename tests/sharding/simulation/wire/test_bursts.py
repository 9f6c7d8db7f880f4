"""Bursts on links: when messages arrive, beside a token bucket that is counted byte by byte."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrec_bls.sharding.simulation.engine.critical_path import critical_path
from torchrec_bls.sharding.simulation.engine.timeline import simulate
from torchrec_bls.sharding.simulation.program import Ranks, graph_of

from torchrec_bls.rank_steps import Begin, Exchange, Messages, PlannedCollective, Wait, Work

_ROWS = Exchange("rows")
_GAPS, _SIZES = st.floats(0.0, 100.0), st.floats(0.01, 100.0)


def _linked(ranks: int, per_host: int, burst: float) -> Ranks:
    """Returns ranks whose hosts send a byte in a microsecond."""
    link = {"link_bytes_per_us": 1.0, "link_burst_bytes": burst}
    return Ranks.on_hosts(ranks, per_host, cores=per_host, **link)


def _arrivals(ranks: Ranks, before: list[float], bytes_sent: list[float]) -> list[float]:
    """Returns when the messages of each step have arrived, if each rank sends as many bytes."""
    of_all = np.ones((ranks.count, 1))
    program = [
        Work(of_all * before, "before"),
        Begin(_ROWS, Messages(transfer_us=of_all * bytes_sent), work_us=0.0),
    ]
    timeline = simulate(graph_of(program, ranks, len(before)))
    return timeline.end[timeline.graph.called("rows arrived")].tolist()


@given(st.lists(st.tuples(_GAPS, _SIZES), min_size=1, max_size=12), st.floats(0.1, 150.0))
def test_messages_arrive_as_from_a_token_bucket(
    steps: list[tuple[float, float]], burst: float
) -> None:
    before, sent = (list(each) for each in zip(*steps, strict=True))
    arrived = _arrivals(_linked(2, 1, burst), before, sent)
    now, tokens, free = 0.0, burst, 0.0
    for gap, size, found in zip(before, sent, arrived, strict=True):
        now += gap
        # Messages leave in order, and each one once there are tokens for all of it, or as many as
        # fit and then the rest at the link's rate.
        begins = max(now, free)
        tokens = min(burst, tokens + begins - free)
        passed = begins + max(size - tokens, 0.0)
        tokens, free = max(tokens - size, 0.0), passed
        assert passed - 1e-6 <= found <= passed + burst / 4 + 1e-6


def test_what_fits_passes_at_once_and_is_paid_back() -> None:
    together = _arrivals(_linked(2, 1, 100.0), [10.0, 0.0], [80.0, 80.0])
    # 60 bytes more than fit.
    assert together == pytest.approx([10.0, 70.0])
    apart = _arrivals(_linked(2, 1, 100.0), [10.0, 60.0], [80.0, 80.0])
    assert apart == pytest.approx([10.0, 70.0])
    assert _arrivals(_linked(2, 1, 100.0), [10.0], [160.0]) == [70.0]
    assert _arrivals(_linked(2, 1, 100.0), [10.0, 5.0], [160.0, 0.0]) == [70.0, 70.0]


def test_ranks_of_a_host_share_its_burst() -> None:
    assert _arrivals(_linked(4, 2, 100.0), [0.0], [80.0]) == pytest.approx([60.0])


def test_steady_messages_pass_at_the_link_s_rate() -> None:
    ranks = _linked(2, 1, 100.0)
    for by in (Messages(transfer_us=50.0), PlannedCollective(0.0, transfer_us=50.0)):
        program = [Begin(_ROWS, by, work_us=1.0, finish_us=1.0), Wait(_ROWS)]
        timeline = simulate(graph_of(program, ranks, 100))
        last = critical_path(timeline)[-1]
        assert timeline.end[last] == pytest.approx(100 * 50.0 - 100.0, rel=0.02)
        assert timeline.graph.thread[last] < ranks.count

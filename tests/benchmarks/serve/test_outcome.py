"""How a run is counted, when it is void, and which rate is called the capacity."""

from array import array
from dataclasses import replace

import pytest

from benchmarks.serve.capacity import capacity, valid
from benchmarks.serve.open_loop import MALFORMED, NOTHING, RESET, OpenLoop
from benchmarks.serve.outcome import Outcome, outcome_of, table


def ended(responses: list[tuple[int, float]], lags: list[float]) -> OpenLoop:
    """A loop that has noted these statuses and latencies."""
    loop = OpenLoop(("127.0.0.1", 1), [b""], [0.0] * len(responses), 1, keep=False)
    loop.status = array("i", [status for status, _ in responses])
    loop.latency = array("d", [latency for _, latency in responses])
    loop.lags, loop.sent = array("d", lags), len(responses)
    return loop


def counted(responses: list[tuple[int, float]], lags: list[float]) -> Outcome:
    return outcome_of(ended(responses, lags), 10.0, 2.0, 0.02, (0.5, 1.5))


MIXED = [
    *[(200, 0.02)] * 6,
    *[(200, 0.0201)] * 2,
    *[(503, 0.001)] * 3,
    *[(504, 0.002)] * 1,
    *[(400, 0.001), (RESET, 0.1), (NOTHING, 2.0), (MALFORMED, 0.1)],
]


def test_each_request_is_counted_once() -> None:
    outcome = counted(MIXED, [0.0])
    assert (outcome.offered, outcome.in_time, outcome.late) == (16, 6, 2)
    assert outcome.refused == {503: 3, 504: 1}
    failed = {"status 400": 1, "reset": 1, "nothing within 2 s": 1, "malformed": 1}
    assert outcome.failed == failed
    assert (outcome.in_time_rate, outcome.in_time_share, outcome.late_share) == (3.0, 6 / 16, 0.25)


def test_percentiles_are_of_answers_or_of_refusals() -> None:
    outcome = counted([(200, turn / 1000) for turn in range(1, 101)] + [(503, 0.5)], [0.0])
    assert outcome.latency_ms(50, 200) == pytest.approx(50, rel=0.002)
    assert outcome.latency_ms(99, 200) == pytest.approx(99, rel=0.002)
    assert outcome.latency_ms(99, 503, 504) == pytest.approx(500, rel=0.002)
    assert outcome.latency_ms(99, 504) is None
    text = table(outcome)
    assert "answered in time | 20 (19.80 %)" in text
    assert "refused with 503 | 1" in text
    assert "void" not in text


@pytest.mark.parametrize(("slow", "void"), [(0, False), (1, False), (3, True)])
def test_a_run_is_void_if_the_99th_percentile_of_the_lag_is_above_a_millisecond(
    slow: int, void: bool
) -> None:
    outcome = counted([(200, 0.001)], [0.0005] * (200 - slow) + [0.0015] * slow)
    assert outcome.void == void
    assert ("void" in table(outcome)) == void


def at_capacity(limit: float, share_above: float = 0.5) -> tuple[list[float], object]:
    tried: list[float] = []

    def run(rate: float, seconds: float, seed: int) -> Outcome:
        tried.append(rate)
        offered = 10_000
        in_time = offered if rate <= limit else round(offered * share_above)
        return replace(counted([(200, 0.001)], [0.0]), offered=offered, in_time=in_time, rate=rate)

    return tried, run


@pytest.mark.parametrize("first", [1.5, 100.0, 777.0, 20_000.0])
def test_the_capacity_is_found_from_below_and_above(first: float) -> None:
    _, run = at_capacity(777.0)
    found = capacity(run, first)
    assert 777.0 / 1.03 <= found.rate <= 777.0
    assert [outcome.rate for outcome in found.confirmed] == [found.rate] * 3


def test_a_rate_that_a_longer_run_does_not_confirm_is_lowered() -> None:
    _, of_steps = at_capacity(800.0)
    _, of_confirmation = at_capacity(700.0, share_above=0.985)

    def run(rate: float, seconds: float, seed: int) -> Outcome:
        return (of_steps if seconds == 10.0 else of_confirmation)(rate, seconds, seed)

    assert 700.0 / 1.03 <= capacity(run, 100.0).rate <= 700.0


def test_no_answer_in_time_is_no_capacity() -> None:
    _, run = at_capacity(0.0)
    with pytest.raises(RuntimeError, match="not even one request"):
        capacity(run, 64.0)


def test_a_void_run_is_taken_again_and_given_up_after_some() -> None:
    good, void = counted([(200, 0.001)], [0.0]), counted([(200, 0.001)], [0.002])
    results = iter([void, void, good])
    assert valid(lambda *_: next(results), 10.0, 2.0, 0) is good
    with pytest.raises(RuntimeError, match=r"lagged by 2.0 ms .* SCHED_FIFO"):
        valid(lambda *_: void, 10.0, 2.0, 0)

"""Counts of one worker, and of several."""

import msgspec
import pytest

from torchrec_bls.serve import tally as module
from torchrec_bls.serve.outcomes import Outcome
from torchrec_bls.serve.tally import Ended, Tally, ToldTally, together


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_the_rate_is_of_the_last_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    tally = Tally()
    assert tally.rate() == 0
    for _ in range(40):  # 20 a second, for two seconds
        clock.now += 0.05
        tally.add(Ended(clock.now, Outcome.OK, 0.001))
    assert tally.rate() == pytest.approx(20, rel=0.01)
    clock.now += 8.0
    assert tally.rate() == pytest.approx(4, rel=0.05)
    clock.now += 10.0
    assert tally.rate() == 0


def test_the_rate_is_right_when_few_seconds_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    tally = Tally()
    for _ in range(10_000):
        clock.now += 0.0005
        tally.add(Ended(clock.now, Outcome.OK, 0.001))
    assert tally.rate() == pytest.approx(2000, rel=0.01)


def told(tally: Tally) -> ToldTally:
    """Returns what another process reads."""
    return msgspec.json.decode(msgspec.json.encode(tally.told()), type=ToldTally)


def test_what_another_process_is_told_is_the_same() -> None:
    tally = Tally()
    for number, outcome in enumerate(Outcome):
        tally.add(Ended(float(number), outcome, number / 1e3))
    same = together([told(tally)])
    assert (same.counts, same.last, same.began) == (tally.counts, tally.last, tally.began)


def test_several_workers_are_one_by_the_moments_of_their_requests() -> None:
    tallies = [Tally() for _ in range(3)]
    tallies[1].began -= 100
    for number in range(6000):
        outcome = Outcome.LATE if number % 3 else Outcome.OK
        tallies[number % 3].add(Ended(float(number), outcome, 0.001))
    whole = together(map(told, tallies))
    assert [each.moment for each in whole.last] == [float(each) for each in range(3952, 6000)]
    assert (whole.counts[Outcome.OK], whole.counts[Outcome.LATE]) == (2000, 4000)
    assert whole.began == tallies[1].began

"""The capacity of a server: the highest rate at which it answers almost all requests in time."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.serve.outcome import Outcome

#: Of the intended requests, the share that has to be answered in time.
ENOUGH = 0.99
#: Where a search ends: the rate above is at most this share higher.
_STEP = 0.03
# Runs that confirm a rate, and how many of them have to.
_RUNS, _CONFIRMING = 3, 2
# A run whose generator lagged is taken again, so often.
_ATTEMPTS = 5

#: Loads a server at a rate, for some seconds, at moments drawn from a seed.
Run = Callable[[float, float, int], Outcome]


@dataclass(frozen=True)
class Capacity:
    """A rate that has been confirmed.

    Attributes:
        rate: requests a second.
        confirmed: the runs at it, of which most confirm it.
        searched: rates that were tried, in order, with the share answered in time.
    """

    rate: float
    confirmed: list[Outcome]
    searched: list[tuple[float, float]]


def valid(run: Run, rate: float, seconds: float, seed: int) -> Outcome:
    """A run that is not void.

    Raises:
        RuntimeError: the generator lagged in every attempt.
    """
    for _ in range(_ATTEMPTS):
        outcome = run(rate, seconds, seed)
        if not outcome.void:
            return outcome
    raise RuntimeError(
        f"the generator lagged by {outcome.lag_p99_ms:.1f} ms (99th percentile) at {rate:g} "
        "requests a second: let nothing else run on its core, and let it have SCHED_FIFO"
    )


def is_enough(run: Run, rate: float, seconds: float, seed: int) -> bool:
    """Whether a server answers almost all requests in time at a rate. What it fails once it may try
    again: a moment in which the machine stood still costs it more than 1 % of some seconds."""
    return any(
        valid(run, rate, seconds, each).in_time_share >= ENOUGH for each in (seed, 500 + seed)
    )


def capacity(run: Run, first: float, step_s: float = 10.0, confirm_s: float = 20.0) -> Capacity:
    """Searches by bisection, and confirms what it found in most of three runs, or goes down until
    it can.

    Args:
        run: loads the server.
        first: the rate that is tried first. The search doubles or halves it until it has both ends.
        step_s: seconds of a step of the search.
        confirm_s: seconds of a run that confirms.

    Raises:
        RuntimeError: the generator lagged, or the server answers not even one request a second.
    """
    searched: list[tuple[float, float]] = []

    def observed(rate: float, seconds: float, seed: int) -> Outcome:
        outcome = run(rate, seconds, seed)
        searched.append((rate, outcome.in_time_share))
        return outcome

    def suffices(rate: float) -> bool:
        return is_enough(observed, rate, step_s, len(searched))

    low = high = first
    if suffices(first):
        while suffices(high := 2 * low):
            low = high
    else:
        while not suffices(low := high / 2):
            high = low
            if low < 1:
                raise RuntimeError("the server answers not even one request a second in time")
    while high > low * (1 + _STEP):
        middle = (low * high) ** 0.5
        if suffices(middle):
            low = middle
        else:
            high = middle
    while low >= 1:
        confirmed = [valid(run, low, confirm_s, 1000 + seed) for seed in range(_RUNS)]
        if sum(each.in_time_share >= ENOUGH for each in confirmed) >= _CONFIRMING:
            return Capacity(low, confirmed, searched)
        low /= 1 + _STEP
    raise RuntimeError("no rate could be confirmed: what the server answers in time varies")

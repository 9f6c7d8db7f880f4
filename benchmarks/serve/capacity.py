"""The capacity of a server: the highest rate at which it answers almost all requests in time."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.serve.outcome import Outcome

#: Of the intended requests, the share that has to be answered in time.
ENOUGH = 0.99
#: Where a search ends: the rate above is at most this share higher.
_STEP = 0.03
_RUNS = 3
# A run whose generator lagged is taken again, so often.
_ATTEMPTS = 5

#: Loads a server at a rate, for some seconds, at moments drawn from a seed.
Run = Callable[[float, float, int], Outcome]


@dataclass(frozen=True)
class Capacity:
    """A rate that has been confirmed.

    Attributes:
        rate: requests a second.
        confirmed: the runs that confirm it.
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


def capacity(run: Run, first: float, step_s: float = 10.0, confirm_s: float = 20.0) -> Capacity:
    """Searches by bisection, and confirms what it found in three runs, or goes down until it can.

    Args:
        run: loads the server.
        first: the rate that is tried first. The search doubles or halves it until it has both ends.
        step_s: seconds of a step of the search.
        confirm_s: seconds of a run that confirms.

    Raises:
        RuntimeError: the generator lagged, or the server answers not even one request a second.
    """
    searched: list[tuple[float, float]] = []

    def is_enough(rate: float) -> bool:
        share = valid(run, rate, step_s, len(searched)).in_time_share
        searched.append((rate, share))
        return share >= ENOUGH

    low = high = first
    if is_enough(first):
        while is_enough(high := 2 * low):
            low = high
    else:
        while not is_enough(low := high / 2):
            high = low
            if low < 1:
                raise RuntimeError("the server answers not even one request a second in time")
    while high > low * (1 + _STEP):
        middle = (low * high) ** 0.5
        if is_enough(middle):
            low = middle
        else:
            high = middle
    while low >= 1:
        confirmed = []
        for seed in range(_RUNS):
            confirmed.append(valid(run, low, confirm_s, 1000 + seed))
            if confirmed[-1].in_time_share < ENOUGH:
                break
        else:
            return Capacity(low, confirmed, searched)
        low /= 1 + _STEP
    raise RuntimeError("no rate could be confirmed: what the server answers in time varies")

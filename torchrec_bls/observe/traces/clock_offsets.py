"""How far the clocks of ranks are apart, from the messages that they waited for.

Traces of several hosts have clocks of their own. No message is read before it is sent, which bounds
each difference of two clocks from one side; and a wait that really waited ended with the arrival of
the last message, so that over many steps such a bound is met again and again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# A bound is an equation if so many steps come this near to it, in microseconds. Where ranks share
# cores messages are read late now and then: of those who are known to have waited it may be more.
_NEAR_US, _FARTHEST_US = 60.0, 2000.0
_LEAST_STEPS, _LEAST_SHARE = 3, 0.02
# By how much longer a rank waits than the one that it waits for.
_LONGER = 2.0
# Of two bounds from both sides the rarer one is by chance below this share of the other.
_AS_OFTEN = 0.25


class UnrelatedClocksError(ValueError):
    """Nothing says how far the clocks of some ranks are apart."""


def clock_offsets(
    sent_us: npt.ArrayLike, received_us: npt.ArrayLike, waited_us: npt.ArrayLike | None = None
) -> Floats:
    """Returns how far each rank's clock is ahead of rank 0's, (ranks,) microseconds.

    What is left of an error is at most what a message takes from one rank to another.

    Args:
        sent_us: (ranks, steps), when each rank had sent its messages, by its own clock.
        received_us: (ranks, steps), when each rank had those of all ranks, by its own clock.
        waited_us: (ranks, steps), for how long it waited for them; without it all may have waited.

    Raises:
        ValueError: the shapes differ, or there are times that are no numbers.
        UnrelatedClocksError: a rank never waited, and nobody for it.
    """
    sent, received = np.asarray(sent_us, np.float64), np.asarray(received_us, np.float64)
    if sent.ndim != 2 or sent.shape != received.shape or sent.size == 0:
        raise ValueError(
            f"times have shapes {sent.shape} and {received.shape}, expected (ranks, steps) twice"
        )
    if not (np.isfinite(sent).all() and np.isfinite(received).all()):
        raise ValueError("there are times that are no numbers")
    ranks, steps = sent.shape
    ahead = received[:, None] - sent[None]
    # By how much the clock of [rank] is ahead of that of [source], at most.
    most = ahead.min(axis=2)
    waits = np.ones_like(ahead, bool) if waited_us is None else _for_whom(np.asarray(waited_us))
    farthest = _NEAR_US if waited_us is None else _FARTHEST_US
    near = _NEAR_US
    met = _met(ahead - most[..., None], waits, near)
    offsets = np.full(ranks, np.nan)
    offsets[0] = 0.0
    while (unknown := np.isnan(offsets)).any():
        # What was met most often is least by chance.
        ways = np.maximum(met, met.T) * np.outer(~unknown, unknown)
        one, other = np.unravel_index(int(ways.argmax()), ways.shape)
        if ways[one, other] == 0:
            near *= 2
            if near > farthest:
                raise UnrelatedClocksError(
                    f"ranks {np.flatnonzero(unknown).tolist()} never waited for others, nor others "
                    f"for them, in {steps} steps: record more of them"
                )
            met = _met(ahead - most[..., None], waits, near)
            continue
        takes = _least_latency(most, _both(met))
        if _both(met)[one, other]:
            difference = (most[other, one] - most[one, other]) / 2
        elif met[other, one] > met[one, other]:
            difference = most[other, one] - takes
        else:
            difference = takes - most[one, other]
        offsets[other] = offsets[one] + difference
    return offsets


def _met(over: Floats, waits: npt.NDArray[np.bool_], near: float) -> Floats:
    """Returns (ranks, ranks), in which share of the steps [rank] may have waited for [source], and
    was as far ahead of it as it is at most, or nearly; 0 where that is by chance.

    Args:
        over: (ranks, ranks, steps), what is between the two.
        waits: (ranks, ranks, steps).
        near: microseconds.
    """
    met: Floats = np.mean((over < near) & waits, axis=2)
    np.fill_diagonal(met, 0.0)
    met[met < max(_LEAST_SHARE, _LEAST_STEPS / over.shape[2])] = 0.0
    return met


def _for_whom(waited: Floats) -> npt.NDArray[np.bool_]:
    """Returns (ranks, ranks, steps), whether [rank] may have waited for [source]: the last one to
    send waits for nobody, whatever clocks say."""
    long: npt.NDArray[np.bool_] = waited[:, None] > np.maximum(_NEAR_US, _LONGER * waited[None])
    return long


def _both(met: Floats) -> npt.NDArray[np.bool_]:
    """Returns which ranks waited for each other, neither much more often than the other."""
    both: npt.NDArray[np.bool_] = np.minimum(met, met.T) > _AS_OFTEN * np.maximum(met, met.T)
    return both & (met > 0)


def _least_latency(most: Floats, both: npt.NDArray[np.bool_]) -> float:
    """Returns what a message takes, from ranks that waited for each other; 0 if none did."""
    ways = (most + most.T)[both]
    return max(0.0, float(ways.min()) / 2) if ways.size else 0.0

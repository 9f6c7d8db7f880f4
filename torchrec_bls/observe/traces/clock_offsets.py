"""How far the clocks of ranks are apart, from the messages that they waited for.

Traces of several hosts have clocks of their own. No message is read before it is sent, which bounds
each difference of two clocks from one side; and a wait that really waited ended with the arrival of
the last message, so that over many steps such a bound is met again and again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# A bound is an equation if so many steps come this near to it, in microseconds.
_NEAR_US = 60.0
_LEAST_STEPS, _LEAST_SHARE = 3, 0.02
# Of two bounds from both sides the rarer one is by chance below this share of the other.
_AS_OFTEN = 0.25


class UnrelatedClocksError(ValueError):
    """Nothing says how far the clocks of some ranks are apart."""


def clock_offsets(sent_us: npt.ArrayLike, received_us: npt.ArrayLike) -> Floats:
    """Returns how far each rank's clock is ahead of rank 0's, (ranks,) microseconds.

    What is left of an error is at most what a message takes from one rank to another.

    Args:
        sent_us: (ranks, steps), when each rank had sent its messages, by its own clock.
        received_us: (ranks, steps), when each rank had those of all ranks, by its own clock.

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
    ranks = len(sent)
    # By how much the clock of [rank] is ahead of that of [source], at most.
    most = np.zeros((ranks, ranks))
    # In how many steps it was by so much, or nearly.
    met = np.zeros((ranks, ranks))
    for rank in range(ranks):
        for source in range(ranks):
            if rank != source:
                ahead = received[rank] - sent[source]
                most[rank, source] = ahead.min()
                met[rank, source] = np.mean(ahead < ahead.min() + _NEAR_US)
    met[met < max(_LEAST_SHARE, _LEAST_STEPS / sent.shape[1])] = 0.0
    takes = _least_latency(most, _both(met))
    offsets = np.full(ranks, np.nan)
    offsets[0] = 0.0
    while (unknown := np.isnan(offsets)).any():
        # What was met most often is least by chance.
        ways = np.maximum(met, met.T) * np.outer(~unknown, unknown)
        one, other = np.unravel_index(int(ways.argmax()), ways.shape)
        if ways[one, other] == 0:
            raise UnrelatedClocksError(
                f"ranks {np.flatnonzero(unknown).tolist()} never waited for others, nor others for "
                f"them, in {sent.shape[1]} steps: record more of them"
            )
        if _both(met)[one, other]:
            difference = (most[other, one] - most[one, other]) / 2
        elif met[other, one] > met[one, other]:
            difference = most[other, one] - takes
        else:
            difference = takes - most[one, other]
        offsets[other] = offsets[one] + difference
    return offsets


def _both(met: Floats) -> npt.NDArray[np.bool_]:
    """Returns which ranks waited for each other, neither much more often than the other."""
    both: npt.NDArray[np.bool_] = np.minimum(met, met.T) > _AS_OFTEN * np.maximum(met, met.T)
    return both & (met > 0)


def _least_latency(most: Floats, both: npt.NDArray[np.bool_]) -> float:
    """Returns what a message takes, from ranks that waited for each other; 0 if none did."""
    ways = (most + most.T)[both]
    return max(0.0, float(ways.min()) / 2) if ways.size else 0.0

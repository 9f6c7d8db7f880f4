"""The differences between the clocks of ranks, from the messages that they waited for.

Traces of several hosts have clocks of their own. No message is read before it is sent. That bounds
each difference of two clocks from one side. A wait that really waited ended with the arrival of the
last message. So over many steps such a bound is met again and again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# A bound is an equation if this share of steps comes this near to it, in microseconds. Where ranks
# share cores, messages are read late now and then; ranks that surely waited may be later still.
_NEAR_US, _FARTHEST_US = 60.0, 2000.0
_LEAST_STEPS, _LEAST_SHARE = 3, 0.02
# Factor by which a rank waits longer than the rank that it waits for.
_LONGER = 2.0
# If the rarer of two bounds from both sides is below this share of the other, it is there by
# chance.
_AS_OFTEN = 0.25


class UnrelatedClocksError(ValueError):
    """The traces do not show how far the clocks of some ranks are apart."""


def clock_offsets(
    sent_us: npt.ArrayLike, received_us: npt.ArrayLike, waited_us: npt.ArrayLike | None = None
) -> Floats:
    """Returns how far each rank's clock is ahead of rank 0's, (ranks,) microseconds.

    The remaining error is at most the time of a message from one rank to another.

    Args:
        sent_us: (ranks, steps), time at which each rank had sent its messages, by its own clock.
        received_us: (ranks, steps), time at which each rank had all messages, by its own clock.
        waited_us: (ranks, steps), how long each rank waited for them; None: all may have waited.

    Raises:
        ValueError: the shapes differ, or a time is no number.
        UnrelatedClocksError: a rank never waited, and no rank waited for it.
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
    # Upper limits: how far the clock of [rank] is ahead of that of [source].
    most = ahead.min(axis=2)
    waits = np.ones_like(ahead, bool) if waited_us is None else _for_whom(np.asarray(waited_us))
    farthest = _NEAR_US if waited_us is None else _FARTHEST_US
    near = _NEAR_US
    met = _met(ahead - most[..., None], waits, near)
    offsets = np.full(ranks, np.nan)
    offsets[0] = 0.0
    while (unknown := np.isnan(offsets)).any():
        # The bound that was met most often is the least likely to be met by chance.
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
    """Returns (ranks, ranks), a share of the steps: those in which [rank] may have waited for
    [source] and was nearly as far ahead of it as it ever is; 0 where that is by chance.

    Args:
        over: (ranks, ranks, steps), how far [rank] was ahead of [source].
        waits: (ranks, ranks, steps), whether [rank] may have waited for [source].
        near: microseconds that count as near.
    """
    met: Floats = np.mean((over < near) & waits, axis=2)
    np.fill_diagonal(met, 0.0)
    met[met < max(_LEAST_SHARE, _LEAST_STEPS / over.shape[2])] = 0.0
    return met


def _for_whom(waited: Floats) -> npt.NDArray[np.bool_]:
    """Returns (ranks, ranks, steps), whether [rank] may have waited for [source]. The last rank to
    send waits for none, whatever the clocks say."""
    long: npt.NDArray[np.bool_] = waited[:, None] > np.maximum(_NEAR_US, _LONGER * waited[None])
    return long


def _both(met: Floats) -> npt.NDArray[np.bool_]:
    """Returns which pairs of ranks waited for each other, about equally often."""
    both: npt.NDArray[np.bool_] = np.minimum(met, met.T) > _AS_OFTEN * np.maximum(met, met.T)
    return both & (met > 0)


def _least_latency(most: Floats, both: npt.NDArray[np.bool_]) -> float:
    """Returns the time of a message, from ranks that waited for each other; 0 if none did."""
    ways = (most + most.T)[both]
    return max(0.0, float(ways.min()) / 2) if ways.size else 0.0

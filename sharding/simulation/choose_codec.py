"""Chooses the codec of embeddings that is worth its rounding, from simulations of one job."""

from __future__ import annotations

from collections.abc import Sequence

from .bounds import WORTH, BoundOutcome, choose_bound, within_limits
from .wire.codecs import FP32


def choose_codec(
    outcomes: Sequence[BoundOutcome],
    *,
    max_memory_bytes: float | None = None,
    max_latency_us: float | None = None,
) -> BoundOutcome:
    """Returns the outcome of the fastest codec, with the bound that `choose_bound` takes for it.

    float32 rounds nothing. It is chosen if it is among the codecs and nearly as fast.

    Args:
        outcomes: outcomes of `simulate_bounds`.
        max_memory_bytes: limit of each rank's memory.
        max_latency_us: limit of a batch's latency.

    Raises:
        ValueError: there is only one codec, or `choose_bound` refuses the limits.
    """
    codecs = list(dict.fromkeys(each.codec for each in outcomes))
    if len(codecs) < 2:
        raise ValueError(f"choosing a codec needs at least two, but there is only {codecs[0]}")
    within = within_limits(outcomes, max_memory_bytes, max_latency_us)
    best = {
        codec: choose_bound(own)
        for codec in codecs
        if (own := [each for each in within if each.codec == codec])
    }
    fastest = min(best.values(), key=lambda each: each.step_us)
    plain = best.get(FP32.name, fastest)
    return plain if plain.step_us < WORTH * fastest.step_us else fastest

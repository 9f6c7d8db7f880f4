"""Programs from measured steps: what a bound would make of the job that was traced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .program import Collect, Compute, Post, Stage
from .task_graph import Floats


def program_of_trace(
    calls: Sequence[tuple[str, str]],
    start: Floats,
    end: Floats,
    sent: Sequence[Floats],
    bound: int,
) -> list[Stage]:
    """Returns the steps as they were, but for their waits, at another bound.

    Args:
        calls: exchange and "post" or "wait", in the order of a step.
        start: (calls, ranks, steps), microseconds; of steps at bound 0.
        end: likewise.
        sent: for each call, (steps,), when the last rank had posted that exchange.
        bound: iterations that ranks may be apart.
    """
    stages: list[Stage] = []
    lag = 0
    before = np.concatenate([start[0][:, :1], end[-1][:, :-1]], axis=1)
    for i, (exchange, action) in enumerate(calls):
        between = np.maximum(start[i] - before, 0.0)
        stages.append(Compute(f"before {action} {exchange}", 0.0, between, lag))
        took = end[i] - start[i]
        if action == "post":
            stages.append(Post(exchange, took, lag=lag))
        else:
            lag += bound
            # What is left of a wait once all have posted is reading.
            reading = np.clip(end[i] - np.maximum(start[i], sent[i]), 0.0, took)
            stages.append(Collect(exchange, reading, lag))
        before = end[i]
    return stages

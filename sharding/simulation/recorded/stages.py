"""Stages of a recorded step. A rank that may be ahead works on an older batch in each stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from .recording import Begin, Exchange, Op, Recording, Wait, Work

Staged = list[list[list[list[Op]]]]
"""Ops by rank, step and stage."""


def staged(recording: Recording) -> Staged:
    """Returns the steps, cut into stages where a rank waits.

    A rank waits for an exchange in the stage after the one that begins it, on all ranks alike. With
    a bound, each stage is that many batches behind the stage before, as in BoundedLagPipeline.

    Raises:
        ValueError: exchanges wait for each other in a circle.
    """
    stage = _stages_of_exchanges(recording)
    last = 1 + max(stage.values(), default=-1)
    return [[_cut(step, stage, last) for step in steps] for steps in recording.ranks]


def _stages_of_exchanges(recording: Recording) -> dict[Exchange, int]:
    stage: defaultdict[Exchange, int] = defaultdict(int)
    steps = [step for steps in recording.ranks for step in steps]
    exchanges = {op.exchange for step in steps for op in step if isinstance(op, Begin)}
    changed = True
    while changed:
        changed = False
        for step in steps:
            now = 0
            for op in step:
                if isinstance(op, Work):
                    continue
                if isinstance(op, Wait):
                    now = max(now, stage[op.exchange] + 1)
                elif now > stage[op.exchange]:
                    stage[op.exchange], changed = now, True
                now = max(now, stage[op.exchange])
                if now > len(exchanges):
                    raise ValueError(
                        f"{op.exchange.name} waits for itself: ranks begin and wait for exchanges "
                        "in orders that contradict each other"
                    )
    return stage


def _cut(step: Sequence[Op], stage: dict[Exchange, int], last: int) -> list[list[Op]]:
    cut: list[list[Op]] = [[] for _ in range(last + 1)]
    now = 0
    for op in step:
        if isinstance(op, Wait):
            now = max(now, stage[op.exchange] + 1)
        elif isinstance(op, Begin):
            now = max(now, stage[op.exchange])
        cut[now].append(op)
    return cut

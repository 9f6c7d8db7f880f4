"""Stages of a recorded step. A rank that may be ahead works on an older batch in each stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from torchrec_bls.rank_steps import Begin, Exchange, Op, Recording, Steps, Wait, Work


def staged(recording: Recording, bound: int) -> tuple[list[Steps], int]:
    """Returns the steps of each rank, cut into stages where it waits, and the last stage's lag.

    A rank waits for an exchange in the stage after the one that begins it, on all ranks alike. Each
    stage is `bound` batches behind the stage before, as in BoundedLagPipeline.

    Raises:
        ValueError: exchanges wait for each other in a circle.
    """
    stage = _stages_of_exchanges(recording)
    last = 1 + max(stage.values(), default=-1)
    ranks: list[Steps] = []
    for steps in recording.ranks:
        cut = [_cut(step, stage, last) for step in steps]
        ranks.append([_of_older_batches(cut, number, bound) for number in range(len(cut))])
    return ranks, last * bound


def _of_older_batches(cut: Sequence[list[list[Op]]], step: int, bound: int) -> list[Op]:
    """Returns what a rank does in a step: in each stage what was recorded of its batch."""
    return [
        replace(op, lag=stage * bound)
        for stage in range(len(cut[0]))
        for op in cut[(step - stage * bound) % len(cut)][stage]
    ]


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

"""A recorded job, as if its exchanges went over bounded-lag channels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from torchrec_bls.rank_steps import Begin, Exchange, Messages, Recording, SeenCollective

from ...cost_interface import CostModel

_TakesUs = Callable[[int, Exchange, SeenCollective], float]


def as_messages(recording: Recording) -> Recording:
    """Returns the job with messages that nobody answers in place of collectives. Reading them takes
    the main thread as long as the collectives took."""
    return _with_messages(recording, lambda number, exchange, seen: seen.worker_us)


def over_channels(recording: Recording, model: CostModel) -> Recording:
    """Returns the job with exchanges that take as long as all-to-alls over channels.

    Reductions become all-to-alls of as many bytes, as in bounded-lag modules. As many ranks share a
    core as where the costs were measured. Work stays as it was recorded.

    Args:
        recording: job over a process group.
        model: costs of all-to-alls over `bls`.

    Raises:
        ValueError: the job was recorded over channels, or the bytes of an exchange were not
            recorded.
    """
    sent: defaultdict[tuple[int, Exchange], list[float]] = defaultdict(list)
    for steps in recording.ranks:
        for number, step in enumerate(steps):
            for op in step:
                if isinstance(op, Begin):
                    sent[number, op.exchange].append(_sent_bytes(op))
    took_us = {key: _all_to_all_us(each, model) for key, each in sent.items()}
    return _with_messages(recording, lambda number, exchange, seen: took_us[number, exchange])


def _with_messages(recording: Recording, takes_us: _TakesUs) -> Recording:
    ranks = [
        [
            [
                replace(op, by=Messages(), finish_us=takes_us(number, op.exchange, op.by))
                if isinstance(op, Begin) and isinstance(op.by, SeenCollective)
                else op
                for op in step
            ]
            for number, step in enumerate(steps)
        ]
        for steps in recording.ranks
    ]
    return replace(recording, ranks=ranks)


def _sent_bytes(begin: Begin) -> float:
    if not isinstance(begin.by, SeenCollective):
        raise ValueError(
            "the job was recorded over bounded-lag channels: its exchanges take what they took, "
            "and need no profile"
        )
    if begin.by.sent_bytes is None:
        raise ValueError(
            f"how many bytes {begin.exchange.name} of process group '{begin.exchange.group}' sent "
            "was not recorded: record the job with torchrec_bls.observe.record_step"
        )
    return begin.by.sent_bytes


def _all_to_all_us(sent: Sequence[float], model: CostModel) -> float:
    mean = [sum(sent) / len(sent)] * len(sent)
    return model.all_to_all(mean, mean, "bls").microseconds

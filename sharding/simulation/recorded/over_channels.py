"""A job recorded over a process group, as if its exchanges went over bounded-lag channels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from ...cost_interface import CostModel
from .recording import Begin, Exchange, Recording


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
    ranks = [
        [
            [
                replace(op, took_us=took_us[number, op.exchange], worker=None, latency_us=0.0)
                if isinstance(op, Begin)
                else op
                for op in step
            ]
            for number, step in enumerate(steps)
        ]
        for steps in recording.ranks
    ]
    return replace(recording, ranks=ranks)


def _sent_bytes(begin: Begin) -> float:
    if begin.worker is None:
        raise ValueError(
            "the job was recorded over bounded-lag channels: its exchanges take what they took, "
            "and need no profile"
        )
    if begin.sent_bytes is None:
        raise ValueError(
            f"how many bytes {begin.exchange.name} of process group '{begin.exchange.group}' sent "
            "was not recorded: record the job with torchrec_bls.observe.record_step"
        )
    return begin.sent_bytes


def _all_to_all_us(sent: Sequence[float], model: CostModel) -> float:
    mean = [sum(sent) / len(sent)] * len(sent)
    return model.all_to_all(mean, mean, "bls").microseconds

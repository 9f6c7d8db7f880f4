"""Traces of torch.profiler from all ranks, joined by the posts and waits of their channels.

Each post and wait of a channel is a range named "bls::<channel> post|wait seq=<sequence> lag=<lag>
bound=<bound>". Ranges with one sequence number belong together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_bls.observe.traces.clock_offsets import clock_offsets
from torchrec_bls.observe.traces.kineto import HOW, KinetoTrace, TraceError
from torchrec_bls.observe.traces.recorded_job import RankWait, RecordedJob, check_ranks
from torchrec_bls.rank_steps import Begin, Exchange, Messages, Op, Recording, Wait, Work

Floats = npt.NDArray[np.float64]

_RANGE = re.compile(r"bls::(?P<channel>.+) (?P<action>post|wait) seq=(?P<sequence>\d{1,18}) "
                    r"lag=\d+ bound=(?P<bound>\d{1,6})")  # fmt: skip


@dataclass(frozen=True)
class ChannelCalls:
    """The posts and waits in one rank's trace.

    Attributes:
        trace: trace that has them.
        calls: start and end in microseconds, by channel and action, then by sequence number.
        bounds: bounds of the channels.
    """

    trace: KinetoTrace
    calls: dict[tuple[str, str], dict[int, tuple[float, float]]]
    bounds: dict[str, int]

    @property
    def rank(self) -> int:
        """Returns the rank in the job."""
        return self.trace.rank


def has_channel_calls(trace: KinetoTrace) -> bool:
    """Returns whether the trace has posts or waits."""
    return any(_RANGE.fullmatch(event.name) for event in trace.events)


def read_channel_calls(trace: KinetoTrace) -> ChannelCalls:
    """Returns the posts and waits of a rank.

    Raises:
        TraceError: the trace has none.
    """
    calls: dict[tuple[str, str], dict[int, tuple[float, float]]] = {}
    bounds: dict[str, int] = {}
    for event in trace.events:
        found = _RANGE.fullmatch(event.name)
        if event.ph != "X" or found is None:
            continue
        of_call = calls.setdefault((found["channel"], found["action"]), {})
        of_call[int(found["sequence"])] = trace.span(event)
        bounds[found["channel"]] = int(found["bound"])
    if not calls:
        raise TraceError(f"{trace.source} has no posts or waits of bounded-lag channels: {HOW}")
    return ChannelCalls(trace, calls, bounds)


@dataclass(frozen=True)
class JoinedTraces:
    """The calls of all ranks in the steps that all of them recorded.

    Attributes:
        traces: traces by rank.
        offsets: (ranks,), microseconds that a rank's clock is ahead of rank 0's.
        calls: channel and action of each call, in the order of a step.
        start: (calls, ranks, steps), begins of the calls, microseconds by rank 0's clock.
        end: (calls, ranks, steps), ends of the calls, microseconds by rank 0's clock.
        bound: bound of the channels.
    """

    traces: list[ChannelCalls]
    offsets: Floats
    calls: list[tuple[str, str]]
    start: Floats
    end: Floats
    bound: int


def join(traces: Sequence[ChannelCalls]) -> JoinedTraces:
    """Joins the traces of all ranks, and finds out how far their clocks are apart.

    Raises:
        TraceError: a rank is missing or is there twice, ranks differ in their channels, or no step
            was recorded by all of them.
        UnrelatedClocksError: a rank never waited, and no rank waited for it.
    """
    by_rank = sorted(traces, key=lambda trace: trace.rank)
    check_ranks([each.trace for each in by_rank])
    first = by_rank[0]
    for trace in by_rank[1:]:
        missing = set(first.calls) ^ set(trace.calls)
        if missing:
            channel, action = sorted(missing)[0]
            raise TraceError(
                f"ranks 0 and {trace.rank} do not both have a {action} of channel '{channel}': "
                "these are traces of different jobs, or of different steps"
            )
    sequences = _common(by_rank)
    calls = sorted(first.calls, key=lambda call: _usual_start(first, call, sequences))
    times = np.array(
        [[[trace.calls[call][each] for each in sequences] for trace in by_rank] for call in calls]
    )
    channels = [channel for channel, action in calls if action == "post"]
    waits = [channel for channel, action in calls if action == "wait"]
    if unmatched := sorted(set(channels) ^ set(waits)):
        raise TraceError(f"channel '{unmatched[0]}' lacks posts or waits: record whole steps")
    sent = [times[i, :, :, 1] for i, (_, action) in enumerate(calls) if action == "post"]
    received = [times[i, :, :, 1] for i, (_, action) in enumerate(calls) if action == "wait"]
    lasted = [
        times[i, :, :, 1] - times[i, :, :, 0]
        for i, (_, action) in enumerate(calls)
        if action == "wait"
    ]
    in_order = [waits.index(channel) for channel in channels]
    offsets = clock_offsets(
        np.concatenate(sent, axis=1),
        np.concatenate([received[i] for i in in_order], axis=1),
        np.concatenate([lasted[i] for i in in_order], axis=1),
    )
    aligned = times - offsets[None, :, None, None]
    return JoinedTraces(
        by_rank, offsets, calls, aligned[..., 0], aligned[..., 1], max(first.bounds.values())
    )


def job_of_channels(joined: JoinedTraces) -> RecordedJob:
    """Returns the job whose posts and waits were joined."""
    _, ranks, steps = joined.start.shape
    sent = {
        channel: joined.end[i]
        for i, (channel, action) in enumerate(joined.calls)
        if action == "post"
    }
    first = joined.start[0]
    return RecordedJob(
        traces=[each.trace for each in joined.traces],
        offsets=joined.offsets,
        step_us=float((first[:, -1] - first[:, 0]).mean() / (steps - 1)),
        waits=list(_waits(joined, sent)),
        recording=Recording(
            ranks=[_lane(joined, rank, sent) for rank in range(ranks)],
            trains=any("gradients" in channel for channel, _ in joined.calls),
            bound=joined.bound,
        ),
    )


def _waits(joined: JoinedTraces, sent: dict[str, Floats]) -> Iterator[RankWait]:
    for i, (channel, action) in enumerate(joined.calls):
        if action == "wait":
            for rank, step in np.ndindex(joined.start.shape[1:]):
                begin, end = (float(times[i, rank, step]) for times in (joined.start, joined.end))
                yield RankWait(rank, step, begin, end, sent[channel][:, step])


def _lane(joined: JoinedTraces, rank: int, sent: dict[str, Floats]) -> list[list[Op]]:
    """Returns the ops of a rank in each step: its calls, and the work between them."""
    start, end = joined.start[:, rank], joined.end[:, rank]
    reading = {
        # The rest of a wait after all have posted.
        channel: np.clip(end[i] - np.maximum(start[i], sent[channel].max(axis=0)), 0.0, None)
        for i, (channel, action) in enumerate(joined.calls)
        if action == "wait"
    }
    now = start[0, 0]
    lane = []
    for step in range(start.shape[1]):
        ops: list[Op] = []
        for i, (channel, action) in enumerate(joined.calls):
            exchange = Exchange(channel, group=channel)
            ops.append(Work(max(0.0, float(start[i, step] - now))))
            now = end[i, step]
            if action == "wait":
                ops.append(Wait(exchange))
            else:
                ops.append(Work(float(now - start[i, step])))
                ops.append(Begin(exchange, Messages(), finish_us=float(reading[channel][step])))
        lane.append(ops)
    return lane


def _common(traces: Sequence[ChannelCalls]) -> list[int]:
    """Returns the consecutive sequence numbers that all ranks have for all calls."""
    every = [set(steps) for trace in traces for steps in trace.calls.values()]
    common = sorted(set.intersection(*every))
    if len(common) < 2:
        spans = {trace.rank: _span(trace) for trace in traces}
        raise TraceError(f"no two steps were recorded by all ranks; sequence numbers are {spans}")
    for trace in traces:
        for (channel, action), steps in trace.calls.items():
            for sequence in range(common[0], common[-1] + 1):
                if sequence not in steps:
                    raise TraceError(
                        f"rank {trace.rank} has no {action} of channel '{channel}' with sequence "
                        f"number {sequence}, though others before and after it: the trace has a gap"
                    )
    return common


def _span(trace: ChannelCalls) -> str:
    every = [sequence for steps in trace.calls.values() for sequence in steps]
    return f"{min(every)} to {max(every)}"


def _usual_start(trace: ChannelCalls, call: tuple[str, str], sequences: Sequence[int]) -> float:
    """Returns when a call usually comes, counted from the first call of its step."""
    first = np.array([min(t[each][0] for t in trace.calls.values()) for each in sequences])
    starts = np.array([trace.calls[call][each][0] for each in sequences])
    return float(np.median(starts - first))

"""Traces of torch.profiler from all ranks, joined by the posts and waits of their channels.

Each post and wait of a channel is a range named "bls::<channel> post|wait seq=<sequence> lag=<lag>
bound=<bound>"; the sequence number says which belong together.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_bls.observe.clock_offsets import clock_offsets

Floats = npt.NDArray[np.float64]

_RANGE = re.compile(r"bls::(?P<channel>.+) (?P<action>post|wait) seq=(?P<sequence>\d+) "
                    r"lag=\d+ bound=(?P<bound>\d+)")  # fmt: skip
_HOW = "profile all ranks with torch.profiler, and export_chrome_trace on each"


class TraceError(ValueError):
    """A file is no trace of a rank, or traces are not of one job."""


@dataclass(frozen=True)
class RankTrace:
    """What one rank's profiler wrote.

    Attributes:
        rank: of the job.
        source: the file.
        events: Chrome's trace events.
        base_us: what is added to their times, microseconds.
        calls: by channel and action, by sequence number: start and end in microseconds.
        bounds: of the channels.
    """

    rank: int
    source: str
    events: list[dict[str, Any]]
    base_us: float
    calls: dict[tuple[str, str], dict[int, tuple[float, float]]]
    bounds: dict[str, int]


def read_trace(path: Path, rank: int) -> RankTrace:
    """Reads a trace; one that ends in .gz is compressed.

    Args:
        path: of the file.
        rank: that it is of if it does not say so itself.

    Raises:
        TraceError: it is no trace, or has no calls of channels.
        OSError: it can't be read.
    """
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is not JSON, or cut off: {error}") from error
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise TraceError(f"{path} has no list of traceEvents: {_HOW}")
    calls: dict[tuple[str, str], dict[int, tuple[float, float]]] = {}
    bounds: dict[str, int] = {}
    # Times are from this moment on where it is said, which differs by rank.
    base = content.get("baseTimeNanoseconds", 0)
    if not isinstance(base, (int, float)):
        raise TraceError(f"{path} has baseTimeNanoseconds {base!r}, which is no number: {_HOW}")
    base /= 1000
    for event in events:
        found = _RANGE.fullmatch(str(event.get("name")))
        if event.get("ph") != "X" or found is None:
            continue
        try:
            start, duration = base + float(event["ts"]), float(event["dur"])
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path} has a range without times: {error!r}") from error
        of_call = calls.setdefault((found["channel"], found["action"]), {})
        of_call[int(found["sequence"])] = (start, start + duration)
        bounds[found["channel"]] = int(found["bound"])
    if not calls:
        raise TraceError(f"{path} has no posts or waits of bounded-lag channels: {_HOW}")
    said = content.get("distributedInfo")
    if isinstance(said, dict) and isinstance(said.get("rank"), int):
        rank = said["rank"]
    return RankTrace(rank, str(path), events, base, calls, bounds)


@dataclass(frozen=True)
class JoinedTraces:
    """The calls of all ranks in the steps that all of them recorded.

    Attributes:
        traces: by rank.
        offsets: (ranks,), microseconds by which clocks are ahead of rank 0's.
        calls: channel and action, in the order of a step.
        start: (calls, ranks, steps), microseconds by rank 0's clock.
        end: likewise.
        bound: of the channels.
    """

    traces: list[RankTrace]
    offsets: Floats
    calls: list[tuple[str, str]]
    start: Floats
    end: Floats
    bound: int


def join(traces: Sequence[RankTrace]) -> JoinedTraces:
    """Joins the traces of all ranks, and finds out how far their clocks are apart.

    Raises:
        TraceError: a rank is missing or there twice, ranks have other channels, or no step that all
            of them recorded.
        UnrelatedClocksError: a rank never waited, and nobody for it.
    """
    by_rank = sorted(traces, key=lambda trace: trace.rank)
    ranks = [trace.rank for trace in by_rank]
    if ranks != list(range(len(ranks))):
        raise TraceError(f"traces are of ranks {ranks}: give one of each, from 0 on")
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
    in_order = [received[waits.index(channel)] for channel in channels]
    offsets = clock_offsets(np.concatenate(sent, axis=1), np.concatenate(in_order, axis=1))
    aligned = times - offsets[None, :, None, None]
    return JoinedTraces(
        by_rank, offsets, calls, aligned[..., 0], aligned[..., 1], max(first.bounds.values())
    )


def _common(traces: Sequence[RankTrace]) -> list[int]:
    """Returns the sequence numbers that all ranks have of all calls, which follow each other."""
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


def _span(trace: RankTrace) -> str:
    every = [sequence for steps in trace.calls.values() for sequence in steps]
    return f"{min(every)} to {max(every)}"


def _usual_start(trace: RankTrace, call: tuple[str, str], sequences: Sequence[int]) -> float:
    """Returns when a call comes in a step, after its first one."""
    first = np.array([min(t[each][0] for t in trace.calls.values()) for each in sequences])
    starts = np.array([trace.calls[call][each][0] for each in sequences])
    return float(np.median(starts - first))

"""gloo's collectives in a rank's trace: when they began, ran, and were waited for.

torch 2.13 records two things over gloo. One is an op `c10d::...` on the thread that calls. The
other is a range `gloo:...` on one of the group's two workers, from when the worker starts the
collective to its end. Neither has the fields of a communication (name, group, sequence number,
sizes): only NCCL fills them in. `record_step` adds them from the flight recorder. No event says
when a rank waits.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torchrec_bls.observe.traces.execution_trace import Node, read_execution_trace
from torchrec_bls.observe.traces.kineto import (
    Event,
    KinetoTrace,
    RecordedCollective,
    TraceError,
)

_STEP = re.compile(r"ProfilerStep#(\d{1,18})")
_WORK = "gloo:"
# gloo's name of the work, by the op that makes it.
_WORK_OF = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "reduce_scatter_": "all_reduce",
    "_reduce_scatter_base_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
}
# By the flight recorder's names of dtypes.
_BYTES_OF = {
    **dict.fromkeys(("Bool", "Byte", "Char"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Double", "Long"), 8),
}
_RECORD = "record them with torchrec_bls.observe.record_step"
_TRAINS = ("autograd::engine::", "Optimizer.step#")
_OF_THREADS = ("cpu_op", "user_annotation", "python_function")
# A rank that went on later than this after a collective's end, and later than any wait takes, did
# something else in between.
_PROMPT_US = 500.0
_CLOCK_US = 1.0
# A shorter pause between two ops belongs to Python.
_LEAST_WAIT_US = 20.0


@dataclass(frozen=True)
class Collective:
    """One rank's part in a collective; times in microseconds by its clock.

    Attributes:
        name: gloo's name, without "gloo:".
        group: process group.
        sequence: number within the group; None if it is not known.
        begun: time at which the call returned that handed it to a worker.
        start: time at which the worker started it.
        end: time at which it was done.
        worker: thread of the worker.
        wait: begin and end of the time that the rank visibly waits for it, or else None.
        used: time at which its result was first read; None if that is not known.
        sent_bytes: the rank's bytes for all ranks, itself included; None if they are not known.
    """

    name: str
    group: str
    sequence: int | None
    begun: float
    start: float
    end: float
    worker: int
    wait: tuple[float, float] | None = None
    used: float | None = None
    sent_bytes: float | None = None


class _Label(NamedTuple):
    """What only the flight recorder knows of a collective."""

    group: str
    sequence: int | None = None
    sent_bytes: float | None = None


@dataclass(frozen=True)
class RankSteps:
    """The record of one rank.

    Attributes:
        trace: Kineto's trace.
        steps: begin and end of each step, by number; a step begins where the one before it ends.
        collectives: the rank's collectives, in the order in which they were begun.
        groups: ranks of each process group; None: all ranks of the job.
        trains: whether there is a backward or an optimizer's step.
    """

    trace: KinetoTrace
    steps: dict[int, tuple[float, float]]
    collectives: list[Collective]
    groups: dict[str, tuple[int, ...] | None]
    trains: bool


def read_steps(trace: KinetoTrace, execution: Path | None) -> RankSteps:
    """Returns the steps and collectives of a rank.

    Args:
        trace: trace of Kineto.
        execution: file of PyTorch's execution trace of the same steps, if there is one.

    Raises:
        TraceError: there are no steps or collectives, the two traces do not join, or the process
            group of a collective is not known.
        OSError: a file can't be read.
    """
    ranges = [event for event in trace.events if event.ph == "X"]
    steps = _steps(trace, ranges)
    works = _in_order(trace, [e for e in ranges if e.name.startswith(_WORK)])
    works = [each for each in works if _name(each) in _WORK_OF.values()]
    calls = _in_order(trace, [e for e in ranges if _called(e) is not None])
    if not works:
        raise TraceError(
            f"{trace.source} has neither posts or waits of bounded-lag channels nor collectives "
            f"of gloo: {_RECORD}, in a job on several ranks"
        )
    calls = _calls_of(trace, calls, works)
    groups, labels = _groups(trace, works)
    found = []
    for call, work, label in zip(calls, works, labels, strict=False):
        (_, begun), (start, end) = trace.span(call), trace.span(work)
        found.append(
            Collective(
                name=_name(work),
                group=label.group,
                sequence=label.sequence,
                begun=begun,
                start=start,
                end=end,
                worker=_thread(trace, work),
                sent_bytes=label.sent_bytes,
            )
        )
    ops = [event for event in ranges if event.cat == "cpu_op"]
    workers = {each.worker for each in found}
    found = _with_waits(found, _busy(trace, ranges, workers))
    if execution is not None:
        nodes = read_execution_trace(execution)
        found = _with_uses(trace, found, calls, ops, nodes, execution)
    trains = any(event.name.startswith(_TRAINS) for event in ranges)
    return RankSteps(trace, steps, found, groups, trains)


def _steps(trace: KinetoTrace, ranges: Iterable[Event]) -> dict[int, tuple[float, float]]:
    spans = {
        int(found[1]): trace.span(event)
        for event in ranges
        if (found := _STEP.fullmatch(event.name)) and event.cat != "gpu_user_annotation"
    }
    done = trace.recorded.steps
    if done is None:
        done = max(spans, default=0) + 1
    numbers = [number for number in sorted(spans) if number < done]
    if not numbers:
        raise TraceError(
            f"{trace.source} has no steps (ranges ProfilerStep#0, 1, ...): {_RECORD}, and call "
            "what it gives after each"
        )
    begin = spans[numbers[0]][0]
    steps = {}
    for number in numbers:
        steps[number] = begin, spans[number][1]
        begin = spans[number][1]
    return steps


def _name(work: Event) -> str:
    return work.name.removeprefix(_WORK)


def _called(event: Event) -> str | None:
    """Returns the work that an op of c10d makes; None for all other events."""
    name = event.name
    return _WORK_OF.get(name.removeprefix("c10d::")) if name.startswith("c10d::") else None


def _in_order(trace: KinetoTrace, events: list[Event]) -> list[Event]:
    """Sorts by the record-function id: a work gets its id when it is called for."""
    if not all(map(trace.id_of, events)):
        raise TraceError(
            f"{trace.source} does not say which call made which of gloo's collectives, as traces "
            f"of the profiler alone never do: {_RECORD}"
        )
    return sorted(events, key=trace.id_of)


def _thread(trace: KinetoTrace, event: Event) -> int:
    thread = event.tid or 0
    if not isinstance(thread, int):
        raise TraceError(f"{trace.source} has a range on the thread {thread[:99]!r}, no number")
    return thread


def _calls_of(trace: KinetoTrace, calls: Sequence[Event], works: Sequence[Event]) -> list[Event]:
    """Returns the call that made each work: the last call before it."""
    ids = [trace.id_of(call) for call in calls]
    made_by = [bisect_left(ids, trace.id_of(work)) - 1 for work in works]
    found = [calls[number] for number in made_by if number >= 0]
    if len(found) < len(works):
        raise TraceError(
            f"{trace.source}: rank {trace.rank} called {len(calls)} collectives, but gloo did "
            f"{len(works)}: calls and works do not join"
        )
    for number, (call, work) in enumerate(zip(found, works, strict=False)):
        if _called(call) != _name(work):
            raise TraceError(
                f"{trace.source}: rank {trace.rank} called {call.name} as its collective "
                f"{number}, but gloo did {work.name}: calls and works do not join"
            )
    return found


def _groups(
    trace: KinetoTrace, works: Sequence[Event]
) -> tuple[dict[str, tuple[int, ...] | None], list[_Label]]:
    """Returns the process groups, and the label of each work."""
    groups = {each.pg_name: each.ranks or None for each in trace.groups()}
    entries = trace.recorded.collectives
    if entries is not None:
        for number, (entry, work) in enumerate(zip(entries, works, strict=False)):
            if entry.name != work.name:
                raise TraceError(
                    f"{trace.source}: the flight recorder's collective {number} is a "
                    f"{entry.name}, but gloo did {work.name}: {_RECORD} again"
                )
        if len(entries) < len(works):
            raise TraceError(
                f"{trace.source}: the flight recorder has {len(entries)} of {len(works)} "
                f"collectives: {_RECORD} again"
            )
        return groups, [
            _Label(entry.group, entry.sequence, _sent_bytes(entry)) for entry in entries
        ]
    used = list(groups) or [""]
    if len(used) > 1:
        raise TraceError(
            f"{trace.source} has {len(used)} process groups and does not say which collective is "
            f"of which: {_RECORD}"
        )
    return {used[0]: groups.get(used[0])}, [_Label(used[0])] * len(works)


def _sent_bytes(entry: RecordedCollective) -> float | None:
    sizes, dtypes = entry.input_sizes, entry.input_dtypes
    if sizes is None or dtypes is None or not set(dtypes) <= _BYTES_OF.keys():
        return None
    # Of floats, the product of impossible sizes is infinite.
    return sum(
        math.prod(size, start=float(_BYTES_OF[dtype]))
        for size, dtype in zip(sizes, dtypes, strict=False)
    )


def _busy(
    trace: KinetoTrace, ranges: Iterable[Event], workers: set[int]
) -> list[tuple[float, float]]:
    """Returns when any thread of the rank surely ran: in ops that are part of no other op.

    Ranges of users, and of autograd and its functions, may hold a wait. They show only that a
    thread ran when they began and when they ended.
    """
    spans: dict[int, list[tuple[float, float, bool]]] = {}
    for each in ranges:
        if each.cat in _OF_THREADS and each.tid not in workers:
            name = each.name
            is_op = each.cat == "cpu_op" and "::" in name and not name.startswith(_TRAINS)
            start, end = trace.span(each)
            spans.setdefault(_thread(trace, each), []).append((start, -end, is_op))
    busy = []
    for own in spans.values():
        own.sort()
        for i, (start, negative_end, is_op) in enumerate(own):
            end = -negative_end
            if is_op and (i + 1 == len(own) or own[i + 1][0] >= end):
                busy.append((start, end))
            else:
                busy += [(start, start), (end, end)]
    busy.sort()
    return busy


def _with_waits(
    collectives: Sequence[Collective], busy: Sequence[tuple[float, float]]
) -> list[Collective]:
    """Adds waits: a rank waited for a collective if it ran nothing when that ended, and soon went
    on."""
    starts = [start for start, _ in busy]
    # Threads overlap. This is the latest end so far.
    latest, ends = float("-inf"), []
    for _, end in busy:
        latest = max(latest, end)
        ends.append(latest)
    by_end = sorted(collectives, key=lambda each: each.end)
    waits: dict[int, tuple[float, float]] = {}
    before = float("-inf")
    for i, each in enumerate(by_end):
        following = bisect_left(starts, each.end - _CLOCK_US)
        idle_from = ends[following - 1] if following else each.begun
        if idle_from > each.end:
            continue
        begin = max(idle_from, each.begun, before)
        goes_on = starts[following] if following < len(starts) else each.end
        if i + 1 < len(by_end):
            goes_on = min(goes_on, by_end[i + 1].end)
        waited = each.end - begin
        if waited < _LEAST_WAIT_US or goes_on - each.end > max(_PROMPT_US, waited):
            continue
        waits[id(each)] = begin, each.end
        before = each.end
    return [replace(each, wait=waits.get(id(each))) for each in collectives]


def _with_uses(
    trace: KinetoTrace,
    collectives: Sequence[Collective],
    calls: Sequence[Event],
    ops: Iterable[Event],
    nodes: Mapping[int, Node],
    execution: Path,
) -> list[Collective]:
    """Adds when results were first read: by the first op after the end that uses the storage."""
    reads: dict[int, list[float]] = {}
    joined = 0
    for op in ops:
        node = nodes.get(trace.id_of(op))
        if node is None or node.name != op.name:
            continue
        joined += 1
        for storage in node.storages:
            reads.setdefault(storage, []).append(trace.span(op)[0])
    if not joined:
        raise TraceError(
            f"{execution} and {trace.source} have no record-function id in common: they are of "
            "different runs"
        )
    for times in reads.values():
        times.sort()
    found = []
    for each, call in zip(collectives, calls, strict=False):
        node = nodes.get(trace.id_of(call))
        later = [
            times[at]
            for storage in (node.first if node else ())
            if (at := bisect_left(times := reads.get(storage, []), max(each.begun, each.end)))
            < len(times)
        ]
        found.append(replace(each, used=min(later, default=None)))
    return found

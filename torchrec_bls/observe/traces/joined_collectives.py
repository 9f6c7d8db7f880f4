"""The collectives of all ranks, joined by process group and order in a step."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchrec_bls.observe.traces.clock_offsets import UnrelatedClocksError
from torchrec_bls.observe.traces.collectives import Collective, RankSteps
from torchrec_bls.observe.traces.kineto import TraceError
from torchrec_bls.observe.traces.recorded_job import RankWait, RecordedJob
from torchrec_bls.rank_steps import Begin, Exchange, Op, Recording, SeenCollective, Wait, Work

Floats = npt.NDArray[np.float64]

# Collectives that no rank finishes before all have begun them.
_OF_ALL = ("all_gather", "all_reduce", "all_to_all", "barrier")


class _Meeting(NamedTuple):
    """A collective: its step's number, and each rank's part."""

    step: int
    exchange: Exchange
    parts: Mapping[int, Collective]


def join_collectives(ranks: Sequence[RankSteps]) -> RecordedJob:
    """Joins the records of all ranks, in the steps that all of them have.

    Args:
        ranks: records by rank.

    Raises:
        TraceError: no step was recorded by all, or ranks have different collectives in a step.
        UnrelatedClocksError: nothing relates the clock of a rank to the others'.
    """
    numbers = sorted(set.intersection(*(set(own.steps) for own in ranks)))
    if not numbers:
        recorded = {i: f"{min(own.steps)} to {max(own.steps)}" for i, own in enumerate(ranks)}
        raise TraceError(f"no step was recorded by all ranks; steps are {recorded}")
    members = _members(ranks)
    meetings = [
        meeting
        for number in numbers
        for group, own in members.items()
        for meeting in _meetings(ranks, number, group, own)
    ]
    offsets = _offsets(meetings, len(ranks))
    lanes = [_lane(own, rank, numbers, meetings, offsets) for rank, own in enumerate(ranks)]
    spans = [own.steps[numbers[-1]][1] - own.steps[numbers[0]][0] for own in ranks]
    return RecordedJob(
        traces=[own.trace for own in ranks],
        offsets=offsets,
        step_us=float(np.mean(spans)) / len(numbers),
        waits=list(_waits(meetings, numbers, offsets)),
        recording=Recording(lanes, trains=any(own.trains for own in ranks)),
    )


def _members(ranks: Sequence[RankSteps]) -> dict[str, tuple[int, ...]]:
    members: dict[str, tuple[int, ...]] = {}
    for own in ranks:
        for group, listed in own.groups.items():
            members[group] = listed or tuple(range(len(ranks)))
            if beyond := [rank for rank in members[group] if rank >= len(ranks)]:
                raise TraceError(
                    f"{own.trace.source} has rank {beyond[0]} in process group '{group}', but "
                    f"traces are of {len(ranks)} ranks"
                )
    return members


def _of_step(own: RankSteps, number: int, group: str) -> list[Collective]:
    begin, end = own.steps[number]
    return [each for each in own.collectives if each.group == group and begin <= each.begun < end]


def _meetings(
    ranks: Sequence[RankSteps], step: int, group: str, members: Sequence[int]
) -> Iterator[_Meeting]:
    of_rank = {rank: _of_step(ranks[rank], step, group) for rank in members}
    most = max(of_rank, key=lambda rank: len(of_rank[rank]))
    for number, other in enumerate(of_rank[most]):
        what = f"collective {number} of process group '{group}' in step {step}"
        for rank, own in of_rank.items():
            if number == len(own):
                raise TraceError(
                    f"rank {rank} has {len(own)} collectives of process group '{group}' in step "
                    f"{step}, but rank {most} {len(of_rank[most])}: it lacks number {number}, "
                    f"{_described(other)}"
                )
            if (own[number].name, own[number].sequence) != (other.name, other.sequence):
                raise TraceError(
                    f"{what} is {_described(own[number])} on rank {rank}, but {_described(other)} "
                    f"on rank {most}: these are traces of different jobs, or of different steps"
                )
        exchange = Exchange(f"{other.name} {number}", group, number)
        yield _Meeting(step, exchange, {rank: own[number] for rank, own in of_rank.items()})


def _described(each: Collective) -> str:
    return each.name + ("" if each.sequence is None else f" with sequence number {each.sequence}")


def _offsets(meetings: Sequence[_Meeting], ranks: int) -> Floats:
    of_all = [
        [meeting.parts[rank] for rank in range(ranks)]
        for meeting in meetings
        if len(meeting.parts) == ranks and meeting.exchange.name.split()[0] in _OF_ALL
    ]
    if not of_all:
        raise UnrelatedClocksError(
            f"no collective is one of all ranks ({', '.join(_OF_ALL)}): nothing says how far the "
            "clocks are apart"
        )
    sent = np.array([[part.start for part in parts] for parts in of_all]).T
    received = np.array([[part.end for part in parts] for parts in of_all]).T
    # A collective ends on all ranks at nearly the same time, and on no rank before all have begun
    # it.
    ahead = np.median(received - received[0], axis=1)
    least, most = np.max(sent - received[0], axis=1), np.min(received - sent[0], axis=1)
    offsets: Floats = np.clip(ahead, least, most)
    return offsets


def _waits(
    meetings: Sequence[_Meeting], numbers: Sequence[int], offsets: Floats
) -> Iterator[RankWait]:
    places = {number: place for place, number in enumerate(numbers)}
    for meeting in meetings:
        sent = np.full(len(offsets), np.nan)
        for rank, part in meeting.parts.items():
            sent[rank] = part.start - offsets[rank]
        for rank, part in meeting.parts.items():
            if part.wait is not None:
                begin, end = part.wait
                own = (begin - offsets[rank], end - offsets[rank])
                yield RankWait(rank, places[meeting.step], *own, sent)


def _lane(
    own: RankSteps,
    rank: int,
    numbers: Sequence[int],
    meetings: Sequence[_Meeting],
    offsets: Floats,
) -> list[list[Op]]:
    """Returns the ops of a rank in each step: work, and what it begins and waits for."""
    ends = [own.steps[number][1] for number in numbers]
    # Begin, end and collective, by step.
    points: list[list[tuple[float, float, Op]]] = [[] for _ in numbers]
    worker_free: defaultdict[int, float] = defaultdict(lambda: float("-inf"))
    mine = [meeting for meeting in meetings if rank in meeting.parts]
    # A call that makes several works returns once.
    for meeting in sorted(mine, key=lambda meeting: meeting.parts[rank].begun):
        part, exchange = meeting.parts[rank], meeting.exchange
        step = numbers.index(meeting.step)
        began = max(each.start - offsets[other] for other, each in meeting.parts.items())
        took = part.end - offsets[rank] - began
        latency = part.start - max(part.begun, worker_free[part.worker])
        worker_free[part.worker] = part.end
        seen = SeenCollective(
            worker_us=float(np.clip(took, 0.0, part.end - part.start)),
            worker=f"worker {part.worker}",
            latency_us=max(0.0, latency),
            sent_bytes=part.sent_bytes,
        )
        points[step].append((part.begun, part.begun, Begin(exchange, seen)))
        if part.wait is not None and (later := bisect_left(ends, part.wait[1])) < len(ends):
            points[later].append((*part.wait, Wait(exchange, lag=later - step)))
        elif part.used is not None and part.used < ends[step]:
            # Not in a later step: then the memory may be another tensor's.
            points[step].append((part.used, part.used, Wait(exchange)))
    lane = []
    for number, own_points in zip(numbers, points, strict=True):
        now, end = own.steps[number]
        ops: list[Op] = []
        for begin_us, end_us, op in sorted(own_points, key=lambda point: point[1]):
            ops += [Work(max(0.0, begin_us - now)), op]
            now = max(now, end_us)
        lane.append([*ops, Work(max(0.0, end - now))])
    return lane

"""Timelines as Chrome's trace events, for ui.perfetto.dev.

A rank is a process, and a thread is a track. Arrows show messages, and for whom a rank waited.
Counters show how far each rank is ahead, and how many slots it has filled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from torchrec_bls.rendering.trace import (
    Event,
    Moment,
    arrow,
    counter,
    process_name,
    slice_of,
    thread_name,
)

from ..engine.critical_path import what_let_it_begin
from ..engine.task_graph import NO_TASK, NO_THREAD, TaskGraph, Tasks
from ..engine.timeline import Timeline

# With more ranks only messages that somebody waited for are shown: there are (ranks squared) of
# all.
_MOST_RANKS_WITH_MESSAGES = 8


def trace_events(timeline: Timeline, threads: Sequence[tuple[int, str]]) -> list[Event]:
    """Returns the events of a trace. Times are microseconds from the simulation's beginning.

    Args:
        timeline: timeline to show.
        threads: rank and name of each thread.

    Raises:
        ValueError: the timeline has another number of threads.
    """
    count = len(timeline.graph.machine.pool)
    if len(threads) != count:
        raise ValueError(f"{len(threads)} names were given for {count} threads")
    return [
        *_names(threads),
        *_slices(timeline, threads),
        *_waits(timeline, threads),
        *_ahead(timeline, threads),
        *_messages(timeline, threads),
        *_slots(timeline, threads),
    ]


def _names(threads: Sequence[tuple[int, str]]) -> Iterator[Event]:
    for rank in sorted({rank for rank, _ in threads}):
        yield process_name(rank, f"rank {rank}")
    for number, (rank, name) in enumerate(threads):
        yield thread_name(rank, number, name)


def _slices(timeline: Timeline, threads: Sequence[tuple[int, str]]) -> Iterator[Event]:
    graph = timeline.graph
    for task in np.flatnonzero(timeline.end > timeline.start).tolist():
        thread = int(graph.thread[task])
        begin = Moment(threads[thread][0], thread, float(timeline.start[task]))
        facts = {"step": int(graph.step[task]), "work_us": float(graph.work[task])}
        name = graph.names[graph.name[task]]
        yield slice_of(name, begin, float(timeline.end[task]), args=facts)


def _waits(timeline: Timeline, threads: Sequence[tuple[int, str]]) -> Iterator[Event]:
    """Yields a slice for each wait, and an arrow from the task that ended it."""
    graph = timeline.graph
    before = graph.before
    free = np.where(before == NO_TASK, 0.0, timeline.end[before])
    # Bytes on a link wait for no one: the rank just has nothing to send.
    waits = (graph.thread != NO_THREAD) & graph.machine.sleeps[graph.thread]
    waits &= timeline.start > free
    for number, task in enumerate(np.flatnonzero(waits).tolist()):
        cause = what_let_it_begin(timeline, task)
        while cause != NO_TASK and graph.thread[cause] == NO_THREAD:
            cause = what_let_it_begin(timeline, cause)
        if cause == NO_TASK:
            continue
        thread, other = int(graph.thread[task]), int(graph.thread[cause])
        rank, for_rank = threads[thread][0], threads[other][0]
        start, ended = float(timeline.start[task]), float(timeline.end[cause])
        since = Moment(rank, thread, float(free[task]))
        yield slice_of(f"waits for rank {for_rank}", since, start, cat="wait")
        name = graph.names[graph.name[cause]]
        ends = Moment(for_rank, other, ended), Moment(rank, thread, start)
        yield from arrow(name, "wait", number, *ends)


def _ahead(timeline: Timeline, threads: Sequence[tuple[int, str]]) -> Iterator[Event]:
    """Yields how many steps each rank is ahead of the last rank, whenever that changes."""
    graph = timeline.graph
    ranks = sorted({rank for rank, _ in threads})
    rank_of = np.array([rank for rank, _ in threads])
    on_thread = np.flatnonzero(graph.thread != NO_THREAD)
    step = dict.fromkeys(ranks, 0)
    shown = dict.fromkeys(ranks, -1)
    for task in on_thread[np.argsort(timeline.start[on_thread], kind="stable")].tolist():
        rank = int(rank_of[graph.thread[task]])
        if graph.step[task] <= step[rank] and min(shown.values()) >= 0:
            continue
        step[rank] = max(step[rank], int(graph.step[task]))
        last = min(step.values())
        for each in ranks:
            ahead = step[each] - last
            if ahead != shown[each]:
                shown[each] = ahead
                yield counter("steps ahead", each, float(timeline.start[task]), steps=ahead)


def _exchanges(
    graph: TaskGraph, threads: Sequence[tuple[int, str]]
) -> Iterator[tuple[str, Tasks, Tasks]]:
    """Yields the exchanges of channels: name, posts and collects, both (ranks, batches)."""
    mains = [number for number, (_, name) in enumerate(threads) if name == "main"]
    for name in graph.names:
        kind, _, exchange = name.partition(" ")
        if kind != "post":
            continue
        posts, collects = (
            np.array([tasks[graph.thread[tasks] == main] for main in mains])
            for tasks in (graph.called(name), graph.called(f"collect {exchange}"))
        )
        yield exchange, posts, collects


def _messages(timeline: Timeline, threads: Sequence[tuple[int, str]]) -> Iterator[Event]:
    """Yields an arrow from each post to the task that reads it on every other rank."""
    graph, start, end = timeline.graph, timeline.start, timeline.end
    for exchange, posts, collects in _exchanges(graph, threads):
        ranks, batches = posts.shape
        if ranks > _MOST_RANKS_WITH_MESSAGES:
            return
        for sender, receiver, batch in np.ndindex(ranks, ranks, batches):
            post, collect = int(posts[sender, batch]), int(collects[receiver, batch])
            no_slice = end[post] == start[post] or end[collect] == start[collect]
            if sender == receiver or no_slice:
                continue
            number = f"{exchange} {batch}: {sender} to {receiver}"
            sent = Moment(sender, int(graph.thread[post]), float(end[post]))
            read = Moment(receiver, int(graph.thread[collect]), float(start[collect]))
            yield from arrow(exchange, "message", number, sent, read)


def _slots(timeline: Timeline, threads: Sequence[tuple[int, str]]) -> Iterator[Event]:
    """Yields how many messages of each rank some receiver has not released, when that changes."""
    for exchange, posts, collects in _exchanges(timeline.graph, threads):
        filled = timeline.start[posts]
        # The release by the last receiver, for each batch.
        released = np.broadcast_to(timeline.end[collects].max(axis=0), filled.shape)
        for rank in range(len(posts)):
            times = np.concatenate([filled[rank], released[rank]])
            change = np.repeat([1, -1], len(filled[rank]))
            # A slot that is released and filled at once stays the same slot.
            order = np.lexsort((change, times))
            for time, count in zip(times[order], change[order].cumsum(), strict=True):
                filled_now = max(int(count), 0)
                yield counter(f"slots of {exchange}", rank, float(time), slots=filled_now)

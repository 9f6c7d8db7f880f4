"""Timelines as Chrome's trace events, for ui.perfetto.dev.

A rank is a process, and a thread is a track. Arrows show messages, and for whom a rank waited.
Counters show how far each rank is ahead, and how many slots it has filled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..engine.critical_path import what_let_it_begin
from ..engine.task_graph import NO_TASK, NO_THREAD, TaskGraph, Tasks
from ..engine.timeline import Timeline

Event = dict[str, Any]

# With more ranks only messages that somebody waited for are shown: there are (ranks squared) of
# all.
_MOST_RANKS_WITH_MESSAGES = 8


def trace_events(timeline: Timeline, threads: Sequence[tuple[int, str]]) -> dict[str, Any]:
    """Returns the content of a trace file. Times are microseconds from the simulation's beginning.

    Args:
        timeline: timeline to show.
        threads: rank and name of each thread.

    Raises:
        ValueError: the timeline has another number of threads.
    """
    count = len(timeline.graph.machine.pool)
    if len(threads) != count:
        raise ValueError(f"{len(threads)} names were given for {count} threads")
    events = [
        *_names(threads),
        *_slices(timeline, threads),
        *_waits(timeline, threads),
        *_ahead(timeline, threads),
        *_messages(timeline, threads),
        *_slots(timeline, threads),
    ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _names(threads: Sequence[tuple[int, str]]) -> Iterator[Event]:
    for rank in sorted({rank for rank, _ in threads}):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for number, (rank, name) in enumerate(threads):
        where = {"pid": rank, "tid": number}
        yield {"ph": "M", "name": "thread_name", **where, "args": {"name": name}}


def _slices(timeline: Timeline, threads: Sequence[tuple[int, str]]) -> Iterator[Event]:
    graph = timeline.graph
    for task in np.flatnonzero(timeline.end > timeline.start).tolist():
        thread = int(graph.thread[task])
        start, end = float(timeline.start[task]), float(timeline.end[task])
        yield {
            "ph": "X",
            "name": graph.names[graph.name[task]],
            "pid": threads[thread][0],
            "tid": thread,
            "ts": start,
            "dur": end - start,
            "args": {"step": int(graph.step[task]), "work_us": float(graph.work[task])},
        }


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
        thread, start = int(graph.thread[task]), float(timeline.start[task])
        here = {"pid": threads[thread][0], "tid": thread}
        if cause == NO_TASK:
            continue
        other = int(graph.thread[cause])
        name = f"waits for rank {threads[other][0]}"
        since = float(free[task])
        yield {"ph": "X", "name": name, **here, "ts": since, "dur": start - since, "cat": "wait"}
        arrow = {"name": graph.names[graph.name[cause]], "cat": "wait", "id": number}
        there = {"pid": threads[other][0], "tid": other}
        # An arrow begins and ends within a slice.
        ended = float(np.nextafter(timeline.end[cause], 0.0))
        yield {"ph": "s", **arrow, **there, "ts": ended}
        yield {"ph": "f", "bp": "e", **arrow, **here, "ts": start}


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
                time = float(timeline.start[task])
                counter = {"ph": "C", "name": "steps ahead", "pid": each, "ts": time}
                yield {**counter, "args": {"steps": ahead}}


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
            # An arrow begins and ends within a slice.
            no_slice = end[post] == start[post] or end[collect] == start[collect]
            if sender == receiver or no_slice:
                continue
            arrow = {"name": exchange, "cat": "message"}
            arrow["id"] = f"{exchange} {batch}: {sender} to {receiver}"
            there, here = ({"tid": int(graph.thread[task])} for task in (post, collect))
            begun = float(np.nextafter(end[post], 0.0))
            yield {"ph": "s", **arrow, "pid": sender, **there, "ts": begun}
            read = float(start[collect])
            yield {"ph": "f", "bp": "e", **arrow, "pid": receiver, **here, "ts": read}


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
                counter = {"ph": "C", "name": f"slots of {exchange}", "pid": rank}
                yield {**counter, "ts": float(time), "args": {"slots": max(int(count), 0)}}

"""Chrome's trace events, for ui.perfetto.dev: what all traces of commands are made of.

Processes and threads have numbers, and their names are events. Times are microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

Event = dict[str, Any]


class Moment(NamedTuple):
    """A time on a thread.

    Attributes:
        process: number of the process.
        thread: number of the thread.
        us: microseconds.
    """

    process: int
    thread: int
    us: float


def write_trace(path: Path, events: Iterable[Event]) -> None:
    """Writes events to a file that ui.perfetto.dev opens.

    Raises:
        OSError: the file can't be written.
    """
    trace = {"displayTimeUnit": "ms", "traceEvents": list(events)}
    path.write_bytes(msgspec.json.encode(trace))


def process_name(process: int, name: str) -> Event:
    """Returns the name of a process."""
    return {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}


def thread_name(process: int, thread: int, name: str) -> Event:
    """Returns the name of a thread."""
    named = {"ph": "M", "name": "thread_name", "pid": process, "tid": thread}
    return {**named, "args": {"name": name}}


def slice_of(name: str, begin: Moment, end_us: float, **more: Any) -> Event:
    """Returns what a thread does from a moment to a later time; `more` is further fields."""
    where = {"pid": begin.process, "tid": begin.thread}
    return {"ph": "X", "name": name, **where, "ts": begin.us, "dur": end_us - begin.us, **more}


def arrow(
    name: str, category: str, number: int | str, begin: Moment, end: Moment
) -> Iterator[Event]:
    """Yields an arrow from the end of a slice to the beginning of another one.

    Args:
        name: name of the arrow.
        category: kind of the arrow.
        number: identity of the arrow among those of its kind.
        begin: end of the first slice.
        end: beginning of the other one.
    """
    shared = {"name": name, "cat": category, "id": number}
    # An arrow begins and ends within a slice.
    within = math.nextafter(begin.us, 0.0)
    yield {"ph": "s", **shared, "pid": begin.process, "tid": begin.thread, "ts": within}
    yield {"ph": "f", "bp": "e", **shared, "pid": end.process, "tid": end.thread, "ts": end.us}


def counter(name: str, process: int, us: float, **values: int) -> Event:
    """Returns values that a process has from a time on."""
    return {"ph": "C", "name": name, "pid": process, "ts": us, "args": values}


def moved(event: Event, process: int, later_us: float, source: str) -> Event:
    """Returns an event of one of several sources as it stands in the trace of all.

    Args:
        event: the event.
        process: number of its process in the trace of all.
        later_us: microseconds that it is later there.
        source: name of the source, whose arrows are no others'.
    """
    changed = {**event, "pid": process}
    if "ts" in event:
        changed["ts"] = event["ts"] + later_us
    if "id" in event:
        changed["id"] = f"{source} {event['id']}"
    return changed

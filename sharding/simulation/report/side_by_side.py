"""Joins a simulated and a measured trace for ui.perfetto.dev, with two processes for each rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torchrec_bls.rendering.trace import Event, moved, process_name

_RANK = re.compile(r"rank (\d+)(.*)")
# Both events describe a process; Kineto's own order would separate the two processes of a rank.
_OF_PROCESSES = ("process_name", "process_sort_index")


def side_by_side(simulated: Sequence[Event], measured: Sequence[Event]) -> list[Event]:
    """Returns the events of a trace with "rank 0 simulated" above "rank 0 measured", and so on.

    Both begin at 0, since the clocks of a simulation and of a job have nothing in common.

    Args:
        simulated: events of `trace_events`.
        measured: events of `torchrec-bls trace --perfetto`. Their processes are named "rank 0", or
            "rank 0, " and a further text.

    Raises:
        ValueError: one of them has no slice, or a process without a rank.
    """
    return [*_side(simulated, "simulated", 0), *_side(measured, "measured", 1)]


def _side(events: Sequence[Event], side: str, number: int) -> Iterator[Event]:
    starts = [float(event["ts"]) for event in events if event.get("ph") == "X"]
    if not starts:
        raise ValueError(f"the {side} trace has no slices: nothing was recorded")
    begin = min(starts)
    names = {
        event["pid"]: str(event["args"]["name"])
        for event in events
        if event.get("ph") == "M" and event.get("name") == "process_name"
    }
    processes: dict[Any, int] = {}
    for event in events:
        process = event.get("pid")
        if process not in processes:
            processes[process] = 2 * len(processes) + number
            yield from _named(names.get(process, ""), processes[process], side, number)
        if event.get("ph") == "M" and event.get("name") in _OF_PROCESSES:
            continue
        yield moved(event, processes[process], -begin, side)


def _named(name: str, process: int, side: str, number: int) -> Iterator[Event]:
    found = _RANK.fullmatch(name)
    if found is None:
        raise ValueError(f"the {side} trace has a process '{name}', but each has to be of a rank")
    rank, more = int(found[1]), found[2]
    yield process_name(process, f"rank {rank} {side}{more}")
    order = {"sort_index": 2 * rank + number}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": order}

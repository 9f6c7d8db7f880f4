"""Joins a simulated and a measured trace for ui.perfetto.dev, with two processes for each rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Event = dict[str, Any]

_RANK = re.compile(r"rank (\d+)(.*)")
# Both events describe a process; Kineto's own order would separate the two processes of a rank.
_OF_PROCESSES = ("process_name", "process_sort_index")


def side_by_side(simulated: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one trace in which "rank 0 simulated" stands above "rank 0 measured", and so on.

    Both begin at 0, since the clocks of a simulation and of a job have nothing in common.

    Args:
        simulated: trace of `trace_events`.
        measured: trace of `torchrec-bls trace --perfetto`. Its processes are named "rank 0", or
            "rank 0, " and a further text.

    Raises:
        ValueError: one of them has no slice, or a process without a rank.
    """
    events = [*_side(simulated, "simulated", 0), *_side(measured, "measured", 1)]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _side(trace: Mapping[str, Any], side: str, number: int) -> Iterator[Event]:
    events = trace["traceEvents"]
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
        changed = {**event, "pid": processes[process]}
        if "ts" in event:
            changed["ts"] = event["ts"] - begin
        if "id" in event:  # an arrow
            changed["id"] = f"{side} {event['id']}"
        yield changed


def _named(name: str, process: int, side: str, number: int) -> Iterator[Event]:
    found = _RANK.fullmatch(name)
    if found is None:
        raise ValueError(f"the {side} trace has a process '{name}', but each has to be of a rank")
    rank, more = int(found[1]), found[2]
    of_process = {"ph": "M", "pid": process}
    yield {**of_process, "name": "process_name", "args": {"name": f"rank {rank} {side}{more}"}}
    order = {"sort_index": 2 * rank + number}
    yield {**of_process, "name": "process_sort_index", "args": order}

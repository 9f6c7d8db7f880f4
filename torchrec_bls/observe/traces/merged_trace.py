"""The traces of all ranks as one trace with one clock, for ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchrec_bls.observe.traces.kineto import KinetoTrace
from torchrec_bls.observe.traces.recorded_job import RecordedJob

# A rank's processes in the merged trace are numbered from the rank times this on.
_PROCESSES = 100


def merged_trace(job: RecordedJob) -> dict[str, Any]:
    """Returns one trace. Times are microseconds from the first event on, by rank 0's clock."""
    begins = [
        trace.base_us + float(event["ts"]) - offset
        for trace, offset in zip(job.traces, job.offsets, strict=True)
        for event in trace.events
        if isinstance(event.get("ts"), (int, float)) and event.get("ph") == "X"
    ]
    begin = min(begins)
    events = [
        event
        for trace, offset in zip(job.traces, job.offsets, strict=True)
        for event in _events(trace, trace.base_us - float(offset) - begin)
    ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _events(trace: KinetoTrace, later_us: float) -> Iterator[dict[str, Any]]:
    numbers: dict[Any, int] = {}
    for event in trace.events:
        process = event.get("pid")
        if process not in numbers:
            numbers[process] = _PROCESSES * trace.rank + len(numbers)
            name = f"rank {trace.rank}" + (f", {process}" if len(numbers) > 1 else "")
            named = {"ph": "M", "name": "process_name", "pid": numbers[process]}
            yield {**named, "args": {"name": name}}
        if event.get("ph") == "M" and event.get("name") == "process_name":
            continue
        changed = {**event, "pid": numbers[process]}
        if isinstance(event.get("ts"), (int, float)):
            changed["ts"] = event["ts"] + later_us
        if "id" in event:  # an arrow, which joins events of this rank only
            changed["id"] = f"{trace.rank}: {event['id']}"
        yield changed

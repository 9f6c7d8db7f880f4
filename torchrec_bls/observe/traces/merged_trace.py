"""The traces of all ranks as one trace with one clock, for ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchrec_bls.observe.traces.kineto import Event, KinetoTrace
from torchrec_bls.observe.traces.recorded_job import RecordedJob
from torchrec_bls.rendering import trace as rendering

# A rank's processes in the merged trace are numbered from the rank times this on.
_PROCESSES = 100
_FIELDS = Event.__struct_fields__
# What stands in place of a field that the file lacks.
_ABSENT = dict(zip(_FIELDS, Event.__struct_defaults__, strict=True))


def merged_trace(job: RecordedJob) -> list[rendering.Event]:
    """Returns the events of one trace. Times are microseconds from the first event on,
    by rank 0's clock."""
    begins = [
        trace.base_us + event.ts - offset
        for trace, offset in zip(job.traces, job.offsets, strict=True)
        for event in trace.events
        if event.ts is not None and event.ph == "X"
    ]
    begin = float(min(begins))
    return [
        event
        for trace, offset in zip(job.traces, job.offsets, strict=True)
        for event in _events(trace, trace.base_us - float(offset) - begin)
    ]


def _events(trace: KinetoTrace, later_us: float) -> Iterator[rendering.Event]:
    numbers: dict[Any, int] = {}
    for event in trace.events:
        process = event.pid
        if process not in numbers:
            numbers[process] = _PROCESSES * trace.rank + len(numbers)
            name = f"rank {trace.rank}" + (f", {process}" if len(numbers) > 1 else "")
            yield rendering.process_name(numbers[process], name)
        if event.ph == "M" and event.name == "process_name":
            continue
        fields = {
            name: value for name in _FIELDS if (value := getattr(event, name)) != _ABSENT[name]
        }
        yield rendering.moved(fields, numbers[process], later_us, f"rank {trace.rank}")

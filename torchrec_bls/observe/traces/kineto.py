"""Files of torch.profiler, each written by one rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from torchrec_bls.records import Format, Whole, decode

T = TypeVar("T")

HOW = "record all ranks with torchrec_bls.observe.record_step"
#: Of what `record_step` adds to a file, under this name.
METADATA, METADATA_FORMAT = "torchrec_bls", 1
#: Bytes of a trace, unpacked.
MOST_BYTES = 1 << 30
_SCHEMA = 1
_MOST_US = 1e18


class TraceError(ValueError):
    """A file is no trace of a rank, or the traces belong to different jobs."""


_Time = Annotated[float, Meta(ge=-_MOST_US, le=_MOST_US)]


class _Arguments(Struct):
    id: int = field(default=0, name="Record function id")


class Event(Struct, gc=False):
    """One of Chrome's trace events.

    Attributes:
        ph: kind of the event; "X" is a range.
        name: name of the event.
        cat: categories of the event.
        ts: microseconds from the base time of the trace on.
        dur: microseconds that a range lasts.
        pid: process.
        tid: thread.
        id: number of an arrow.
        bp: place in a range where an arrow ends.
        s: scope of an instant.
        args: further facts, as JSON.
    """

    ph: str = ""
    name: str = ""
    cat: str = ""
    ts: _Time | None = None
    dur: _Time | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    id: int | str | UnsetType = UNSET
    bp: str | UnsetType = UNSET
    s: str | UnsetType = UNSET
    args: Raw | UnsetType = UNSET


class ProcessGroup(Struct):
    """A process group in `distributedInfo`; without ranks it has all of them."""

    pg_name: str
    ranks: tuple[Whole, ...] = ()


class Job(Struct):
    """The rank's facts about the job, `distributedInfo`."""

    rank: Whole | None = None
    world_size: Whole | None = None
    pg_config: Raw | UnsetType = UNSET


class RecordedCollective(Struct):
    """The facts that `record_step` keeps of a collective, from the flight recorder."""

    name: str
    group: str
    sequence: Whole
    input_sizes: list[list[Whole]] | None = None
    input_dtypes: list[str] | None = None


class Recorded(Struct):
    """The additions of `record_step`: the number of whole steps, and the rank's collectives."""

    format: int = METADATA_FORMAT
    steps: Whole | None = None
    collectives: list[RecordedCollective] | None = None


class _Content(Struct):
    traceEvents: list[Event]
    schemaVersion: int = _SCHEMA
    baseTimeNanoseconds: int | float = 0
    distributedInfo: Job | None = None
    torchrec_bls: Raw | UnsetType = UNSET


_FILE = Format(_Content, HOW, TraceError, most_bytes=MOST_BYTES)


@dataclass(frozen=True)
class KinetoTrace:
    """The trace of one rank's profiler.

    Attributes:
        rank: rank of the job.
        source: path of the file.
        events: Chrome's trace events.
        base_us: microseconds to add to their times.
        job: the rank's facts about the job; may be empty.
        recorded: additions of `record_step`; empty if it did not write the file.
    """

    rank: int
    source: Path
    events: list[Event]
    base_us: float
    job: Job
    recorded: Recorded

    def span(self, event: Event) -> tuple[float, float]:
        """Returns when a range began and ended, microseconds by the rank's clock.

        Raises:
            TraceError: the range has no times.
        """
        if event.ts is None or event.dur is None:
            raise TraceError(f"{self.source} has a range without times: {event.name[:99]!r}")
        start = self.base_us + event.ts
        return start, start + event.dur

    def id_of(self, event: Event) -> int:
        """Returns the record-function id of an event, or 0."""
        if event.args is UNSET:
            return 0
        return self._decode(event.args, _Arguments).id

    def groups(self) -> list[ProcessGroup]:
        """Returns the process groups of the job; empty if they are not known."""
        configured = self.job.pg_config
        if configured is UNSET or bytes(configured)[:1] != b"[":
            return []
        return self._decode(configured, list[ProcessGroup])

    def _decode(self, data: Raw, form: type[T]) -> T:
        return decode(data, form, str(self.source), HOW, TraceError)


def read_kineto(path: Path, rank: int) -> KinetoTrace:
    """Reads a trace. A file that ends in .gz is compressed.

    Args:
        path: path of the file.
        rank: rank of the trace, if the trace itself does not say it.

    Raises:
        TraceError: the file is no trace, is too large, or has an unknown schema.
        OSError: the file can't be read.
    """
    content = _FILE.read(path)
    if content.schemaVersion != _SCHEMA:
        raise TraceError(
            f"{path} has schemaVersion {content.schemaVersion}, but only {_SCHEMA} is known here"
        )
    # If the trace names a base time, its times count from it. The base differs by rank.
    base_us = content.baseTimeNanoseconds / 1000
    if not 0 <= base_us <= _MOST_US:
        raise TraceError(f"{path} has baseTimeNanoseconds that can't be: {HOW}")
    job = content.distributedInfo or Job()
    recorded = Recorded()
    if content.torchrec_bls is not UNSET and bytes(content.torchrec_bls) != b"null":
        where, how = (
            f"{path}, '{METADATA}'",
            "record it again with torchrec_bls.observe.record_step",
        )
        found = decode(content.torchrec_bls, _Format, where, how, TraceError).format
        if found != METADATA_FORMAT:
            raise TraceError(
                f"{path} was recorded in format {found}, but only {METADATA_FORMAT} is known here:"
                " read it with the torchrec-bls that wrote it"
            )
        recorded = decode(content.torchrec_bls, Recorded, where, how, TraceError)
    return KinetoTrace(
        rank if job.rank is None else job.rank, path, content.traceEvents, base_us, job, recorded
    )


class _Format(Struct):
    format: int


def execution_trace_of(kineto: Path) -> Path:
    """Returns where `record_step` writes the execution trace that belongs to a trace of Kineto."""
    return kineto.with_name(f"execution_trace_{kineto.name}")

"""Files of torch.profiler, each written by one rank."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOW = "profile all ranks with torch.profiler, and export_chrome_trace on each"
#: Of what `record_step` adds to a file, under this name.
METADATA, METADATA_FORMAT = "torchrec_bls", 1
_SCHEMA = 1


class TraceError(ValueError):
    """A file is no trace of a rank, or the traces belong to different jobs."""


@dataclass(frozen=True)
class KinetoTrace:
    """The trace of one rank's profiler.

    Attributes:
        rank: rank of the job.
        source: path of the file.
        events: Chrome's trace events.
        base_us: microseconds to add to their times.
        job: `distributedInfo`, the rank's facts about the job; may be empty.
        recorded: additions of `record_step`; empty if it did not write the file.
    """

    rank: int
    source: Path
    events: list[dict[str, Any]]
    base_us: float
    job: Mapping[str, Any]
    recorded: Mapping[str, Any]

    def span(self, event: Mapping[str, Any]) -> tuple[float, float]:
        """Returns when a range began and ended, microseconds by the rank's clock.

        Raises:
            TraceError: the range has no times.
        """
        try:
            start, duration = self.base_us + float(event["ts"]), float(event["dur"])
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{self.source} has a range without times: {error!r}") from error
        return start, start + duration


def read_kineto(path: Path, rank: int) -> KinetoTrace:
    """Reads a trace. A file that ends in .gz is compressed.

    Args:
        path: path of the file.
        rank: rank of the trace, if the trace itself does not say it.

    Raises:
        TraceError: the file is no trace, or has an unknown schema.
        OSError: the file can't be read.
    """
    content = read_json(path)
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise TraceError(f"{path} has no list of traceEvents: {HOW}")
    if (schema := content.get("schemaVersion", _SCHEMA)) != _SCHEMA:
        raise TraceError(f"{path} has schemaVersion {schema!r}, but only {_SCHEMA} is known here")
    # If the trace names a base time, its times count from it. The base differs by rank.
    base = content.get("baseTimeNanoseconds", 0)
    if not isinstance(base, (int, float)):
        raise TraceError(f"{path} has baseTimeNanoseconds {base!r}, which is no number: {HOW}")
    job = content.get("distributedInfo")
    job = job if isinstance(job, dict) else {}
    recorded = content.get(METADATA) or {}
    if recorded and recorded.get("format") != METADATA_FORMAT:
        raise TraceError(
            f"{path} was recorded in format {recorded.get('format')!r}, but only "
            f"{METADATA_FORMAT} is known here: read it with the torchrec-bls that wrote it"
        )
    rank = job["rank"] if isinstance(job.get("rank"), int) else rank
    return KinetoTrace(rank, path, events, base / 1000, job, recorded)


def execution_trace_of(kineto: Path) -> Path:
    """Returns where `record_step` writes the execution trace that belongs to a trace of Kineto."""
    return kineto.with_name(f"execution_trace_{kineto.name}")


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file, which may be compressed.

    Raises:
        TraceError: the file is no JSON.
        OSError: the file can't be read.
    """
    try:
        data = path.read_bytes()
        return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is not JSON, or cut off: {error}") from error

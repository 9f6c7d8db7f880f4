"""Reads the traces of all ranks of a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchrec_bls.observe.traces.channel_calls import (
    has_channel_calls,
    job_of_channels,
    join,
    read_channel_calls,
)
from torchrec_bls.observe.traces.collectives import read_steps
from torchrec_bls.observe.traces.joined_collectives import join_collectives
from torchrec_bls.observe.traces.kineto import TraceError, execution_trace_of, read_kineto
from torchrec_bls.observe.traces.recorded_job import RecordedJob, check_ranks


def read_job(paths: Sequence[Path]) -> RecordedJob:
    """Returns the job of which each rank wrote a trace.

    Posts and waits in bounded-lag channels join the traces if there are any, otherwise gloo's
    collectives.

    Args:
        paths: paths of Kineto's traces. PyTorch's execution traces are read too if `record_step`
            wrote them beside.

    Raises:
        TraceError: a file is no trace, a rank is missing, or the traces do not join.
        UnrelatedClocksError: nothing relates the clock of a rank to the others'.
        OSError: a file can't be read.
    """
    traces = sorted(
        (read_kineto(path, number) for number, path in enumerate(paths)),
        key=lambda trace: trace.rank,
    )
    check_ranks(traces)
    if any(has_channel_calls(trace) for trace in traces):
        return job_of_channels(join([read_channel_calls(trace) for trace in traces]))
    executions = [execution_trace_of(trace.source) for trace in traces]
    return join_collectives(
        [
            read_steps(trace, execution if execution.exists() else None)
            for trace, execution in zip(traces, executions, strict=True)
        ]
    )


def traces_in(folder: Path) -> list[Path]:
    """Returns the traces that `record_step` wrote into a folder.

    Raises:
        TraceError: the folder has none.
    """
    paths = sorted(folder.glob("rank*.json"))
    if not paths:
        raise TraceError(
            f"{folder} has no traces rank0.json, rank1.json, ...: record_step writes them"
        )
    return paths

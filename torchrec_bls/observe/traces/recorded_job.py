"""A job as the traces of all its ranks show it, with one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchrec_bls.observe.traces.kineto import KinetoTrace, TraceError
from torchrec_bls.rank_steps import Recording

Floats = npt.NDArray[np.float64]


class RankWait(NamedTuple):
    """A wait of a rank. Times are microseconds by rank 0's clock.

    Attributes:
        rank: rank that waited.
        step: number of the step among those of the job, from 0 on.
        begin: begin of the wait.
        end: end of the wait.
        sent: (ranks,), time at which each rank had done what was waited for; NaN for ranks without
            a part.
    """

    rank: int
    step: int
    begin: float
    end: float
    sent: Floats


@dataclass(frozen=True)
class RecordedJob:
    """The steps that all ranks recorded.

    Attributes:
        traces: one trace a rank, by rank.
        offsets: (ranks,), microseconds that a rank's clock is ahead of rank 0's.
        step_us: mean time from one step to the next.
        waits: waits of all ranks.
        recording: record of the ranks' work, for a replay.
    """

    traces: Sequence[KinetoTrace]
    offsets: Floats
    step_us: float
    waits: Sequence[RankWait]
    recording: Recording


def check_ranks(traces: Sequence[KinetoTrace]) -> None:
    """Checks that traces are of all ranks of a job, in their order.

    Raises:
        TraceError: a rank is missing or there twice.
    """
    ranks = [trace.rank for trace in traces]
    said = traces[0].job.world_size
    size = len(ranks) if said is None else said
    if len(ranks) != size or ranks != list(range(size)):
        missing = next((rank for rank in range(size) if rank not in ranks), None)
        lacks = "" if missing is None else f"rank {missing} is missing, "
        raise TraceError(f"traces are of ranks {ranks}: {lacks}give one of each, from 0 on")

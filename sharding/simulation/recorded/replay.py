"""Replays a recorded job with other delays or with lag."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchrec_bls.rank_steps import Recording, Work

from ..engine.task_graph import Floats
from ..engine.timeline import Timeline, simulate
from ..program import Lane, Ranks, graph_of_lanes
from .over_channels import as_messages
from .stages import staged

_BEGINS, _ENDS = "batch begins", "batch ends"
# Of all ranks: more than they have threads.
_CORES = 1 << 20


@dataclass(frozen=True)
class Replay:
    """A recorded job with one bound.

    Attributes:
        bound: iterations that ranks may be apart.
        step_us: mean time from one batch to the next, over all ranks.
        step_percentiles_us: the 50th, 95th and 99th percentile of these times.
        latency_us: median time of a batch on its rank, from its beginning to its end.
        timeline: the simulation.
    """

    bound: int
    step_us: float
    step_percentiles_us: tuple[float, float, float]
    latency_us: float
    timeline: Timeline


def replay(recording: Recording, bound: int, delays: Floats) -> Replay:
    """Replays a recorded job.

    Every thread has a core of its own: the recorded times already have what threads took from each
    other. With a bound, collectives are messages that nobody answers. The main thread reads them.

    Args:
        recording: recorded job; its steps are replayed in turn, one for each batch.
        bound: iterations that ranks may be apart.
        delays: (ranks, batches), microseconds that a rank is delayed at the beginning of a batch,
            in addition to what was recorded.

    Raises:
        ValueError: the job can't have the bound, or had it already; or the delays are for another
            number of ranks; or ranks wait for each other in a circle.
    """
    _refuse(recording, bound, delays)
    lag, by_rank = 0, recording.ranks
    if bound > 0:
        recording = as_messages(recording)
        by_rank, lag = staged(recording, bound)
    end = Work(0.0, _ENDS, lag=lag)
    lanes = []
    for rank, steps in enumerate(by_rank):
        begin = Work(0.0, _BEGINS, pause_us=delays[[rank]])
        lanes.append(Lane(np.array([rank]), [[begin, *step, end] for step in steps]))
    ranks = Ranks.on_hosts(len(lanes), per_host=len(lanes), cores=_CORES)
    timeline = simulate(graph_of_lanes(lanes, ranks, delays.shape[1]))
    graph = timeline.graph

    def of_batches(name: str, times: Floats) -> Floats:
        tasks = graph.called(name)
        tasks = tasks[np.lexsort((graph.step[tasks], graph.thread[tasks]))]
        return times[tasks].reshape(delays.shape)

    starts = of_batches(_BEGINS, timeline.start)
    ends = of_batches(_ENDS, timeline.end)
    steps = np.diff(ends.max(axis=0), prepend=0.0)
    return Replay(
        bound=bound,
        step_us=float(ends.max()) / delays.shape[1],
        step_percentiles_us=tuple(np.percentile(steps, [50, 95, 99]).tolist()),
        latency_us=float(np.median(ends - starts)),
        timeline=timeline,
    )


def _refuse(recording: Recording, bound: int, delays: Floats) -> None:
    ranks = len(recording.ranks)
    if bound < 0:
        raise ValueError(f"bound is {bound}, but a bound is 0 or more steps")
    if recording.bound > 0:
        raise ValueError(
            f"the job was recorded at bound {recording.bound}: only one at bound 0 can be replayed"
        )
    if bound > 0 and recording.trains:
        raise ValueError(
            f"bound is {bound}, but the recorded job trains, and only bound 0 does: rows would be "
            "out of date"
        )
    if bound > 0 and recording.begins_early:
        raise ValueError(
            f"bound is {bound}, but recorded steps wait for exchanges that earlier steps began: "
            "only bound 0 can be replayed"
        )
    if delays.ndim != 2 or len(delays) != ranks or delays.shape[1] == 0:
        raise ValueError(
            f"delays have shape {delays.shape}, but must be of {ranks} ranks and 1 or more batches"
        )

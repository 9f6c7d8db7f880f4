"""Simulates a job with several bounds and codecs, to find the bound worth its memory and
latency."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import cast

import numpy as np
from tqdm import tqdm

from ..cost_interface import CostModel
from ..costs.host_costs import HostCosts
from ..problem.job import Job
from ..problem.plan_groups import PlanGroup, groups_of, memory_of
from ..problem.tables import PlacedTable, Workload
from .data_parallel import DenseSteps
from .delays import Delays
from .engine.task_graph import Floats
from .engine.timeline import Timeline, simulate
from .plan_steps import codec_on_the_wire, program_of
from .program import Ranks, graph_of
from .wire.codecs import FP32, CodecCosts

# Part of the batches, at the beginning, that doesn't count: the ranks begin together.
_WARM_UP = 0.1
_LEAST_COUNTED = 8
#: How much faster a larger bound has to be, or a codec.
WORTH = 1.03


@dataclass(frozen=True)
class BoundOutcome:
    """The result of a job with one bound and codec.

    Attributes:
        bound: iterations that ranks may be apart.
        step_us: mean time from one batch to the next, over all ranks.
        step_percentiles_us: the 50th, 95th and 99th percentile of these times.
        latency_us: median time of a batch on its rank, from its begin to its end.
        memory_bytes: memory of the fullest rank: shards, data in flight, slots, results.
        run: function that simulates it again.
        codec: codec of embeddings.
        embedding_bytes: bytes of a batch that travel from all ranks to others.
    """

    bound: int
    step_us: float
    step_percentiles_us: tuple[float, float, float]
    latency_us: float
    memory_bytes: float
    run: Callable[[], Timeline]
    codec: str = FP32.name
    embedding_bytes: float = 0.0

    @property
    def timeline(self) -> Timeline:
        """Returns the simulation, made again: those of many ranks are too large to keep all of
        them."""
        return self.run()


@dataclass(frozen=True)
class Simulation:
    """The settings of a simulation, beside the plan.

    Attributes:
        ranks: the ranks and their cores.
        delays: delays of the ranks.
        batches: batches of each rank.
        seed: seed of the delays, which are the same for every bound.
        host: costs beside lookups and exchanges.
        dense: other layers of the model.
        codecs: codecs of embeddings; each is simulated with each bound.
    """

    ranks: Ranks
    delays: Delays
    batches: int = 200
    seed: int = 0
    host: HostCosts | None = None
    dense: DenseSteps | None = None
    codecs: Sequence[CodecCosts] = (FP32,)


def simulate_bounds(
    plan: Sequence[PlacedTable],
    workload: Workload,
    job: Job,
    model: CostModel,
    bounds: Sequence[int],
    simulation: Simulation,
) -> list[BoundOutcome]:
    """Returns the outcome of a job for each bound, with one codec after the other.

    Args:
        plan: places of the tables.
        workload: the tables.
        job: job that the plan is for; its bound is ignored.
        model: model of lookups and exchanges.
        bounds: bounds to simulate.
        simulation: settings of the simulation.

    Raises:
        ValueError: a bound is above 0 and the job trains, so that rows would be out of date; or
            there are too few batches for a bound.
    """
    delays = simulation.delays.sample(job.ranks, simulation.batches, simulation.seed)
    costs = _remembered(model)
    cells = [(codec, bound) for codec in simulation.codecs for bound in bounds]
    outcomes = []
    for codec, bound in tqdm(cells, desc="simulating", unit="job", leave=False, disable=None):
        one = replace(job, bound=bound)
        outcomes.append(_simulate_one(plan, workload, one, costs, codec, simulation, delays))
    return outcomes


def _remembered(model: CostModel) -> CostModel:
    """Returns costs that are asked for once: bounds and codecs of a job have the same lookups, and
    so have ranks that share a table's rows."""
    asked = ("lookup_forward", "lookup_backward", "all_to_all", "all_reduce")
    once = {name: cache(getattr(model, name)) for name in asked}
    return cast("CostModel", SimpleNamespace(**once))


def _simulate_one(
    plan: Sequence[PlacedTable],
    workload: Workload,
    job: Job,
    costs: CostModel,
    codec: CodecCosts,
    simulation: Simulation,
    delays: Floats,
) -> BoundOutcome:
    ranks, batches = simulation.ranks, simulation.batches
    counted = _counted(batches, job.bound)

    def encoded(group: PlanGroup) -> Floats:
        return codec_on_the_wire(group, codec).row_bytes(group)

    def run() -> Timeline:
        host, dense = simulation.host, simulation.dense
        program = program_of(plan, workload, job, costs, host, dense, codec, ranks.link)
        return simulate(graph_of(program, ranks, batches, delays))

    timeline = run()
    starts = _of_batches(timeline, timeline.start, "load", job.ranks) - delays
    last = "lookup backward" if job.training else "dense forward"
    ends = _of_batches(timeline, timeline.end, last, job.ranks)
    steps = np.diff(ends.max(axis=0)[counted])
    sent = sum(float(encoded(group).sum()) for group in groups_of(plan, workload, job))
    return BoundOutcome(
        bound=job.bound,
        step_us=float(steps.mean()),
        step_percentiles_us=tuple(np.percentile(steps, [50, 95, 99]).tolist()),
        latency_us=float(np.median(ends - starts)),
        memory_bytes=max(memory_of(plan, workload, job, encoded)),
        run=run,
        codec=codec.name,
        embedding_bytes=sent * (job.ranks - 1),
    )


def _counted(batches: int, bound: int) -> slice:
    """Returns the batches whose steps count. The last ones end when none begins, and don't
    count."""
    first, last = int(_WARM_UP * batches), batches - 2 * bound
    if last - first < _LEAST_COUNTED:
        least = int((_LEAST_COUNTED + 2 * bound) / (1 - _WARM_UP)) + 1
        raise ValueError(
            f"{batches} batches are too few to tell a step at bound {bound} from: take {least}"
        )
    return slice(first, last)


def _of_batches(timeline: Timeline, times: Floats, name: str, ranks: int) -> Floats:
    """Returns the times of the last task of that name for each rank and batch, (ranks, batches)."""
    graph = timeline.graph
    tasks = graph.called(name)
    of_rank = [tasks[graph.thread[tasks] == rank] for rank in range(ranks)]
    batches = len(np.unique(graph.step[of_rank[0]]))
    return np.stack([times[own].reshape(batches, -1)[:, -1] for own in of_rank])


def choose_bound(
    outcomes: Sequence[BoundOutcome],
    *,
    max_memory_bytes: float | None = None,
    max_latency_us: float | None = None,
) -> BoundOutcome:
    """Returns the smallest bound that is nearly as fast as the fastest one within the limits.

    Args:
        outcomes: outcomes of `simulate_bounds`.
        max_memory_bytes: limit of each rank's memory.
        max_latency_us: limit of a batch's latency.

    Raises:
        ValueError: a limit is no positive number, or no bound is within the limits; the text says
            what the nearest bound needs.
    """
    within = within_limits(outcomes, max_memory_bytes, max_latency_us)
    fastest = min(each.step_us for each in within)
    near = [each for each in within if each.step_us <= WORTH * fastest]
    return min(near, key=lambda each: each.bound)


def within_limits(
    outcomes: Sequence[BoundOutcome], max_memory_bytes: float | None, max_latency_us: float | None
) -> list[BoundOutcome]:
    """Returns the outcomes that `choose_bound` may take; arguments and errors are the same."""
    limits = {"memory": max_memory_bytes, "latency": max_latency_us}
    for name, limit in limits.items():
        if limit is not None and not 0 < limit < math.inf:
            raise ValueError(f"the limit of {name} is {limit}, but must be a positive number")
    within = [
        each
        for each in outcomes
        if (max_memory_bytes is None or each.memory_bytes <= max_memory_bytes)
        and (max_latency_us is None or each.latency_us <= max_latency_us)
    ]
    if not within:
        least = min(outcomes, key=lambda each: (each.bound, each.memory_bytes))
        raise ValueError(
            f"no bound is within the limits: bound {least.bound} needs "
            f"{least.memory_bytes / 2**30:.3g} GiB on the fullest rank and "
            f"{least.latency_us / 1000:.3g} ms a batch"
        )
    return within

"""What ranks do in a step of a sharded model, from its plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from ..cost_interface import CostModel
from ..problem.job import Job
from ..problem.plan_groups import PlanGroup, groups_of
from ..problem.shard_traffic import result_bytes
from ..problem.tables import PlacedTable, Workload
from .data_parallel import DenseSteps
from .program import Begin, Collect, Compute, Finish, Post, Stage

Floats = npt.NDArray[np.float64]

# Of a one-sided exchange's time, what the sender's puts take; the rest is the receiver's reading.
_PUTS = 0.5


@dataclass(frozen=True)
class HostCosts:
    """Microseconds of a rank's main thread beside lookups and exchanges.

    Attributes:
        step: whatever the model: loading, Python around it, the optimizer's step.
        group: of each set of exchanges of a module.
        feature: of each feature.
        id_byte: of each byte of ids that a rank looks up.
        result_byte: of each byte of embeddings of the own samples.
        dense_forward: of the model's other layers.
        dense_backward: likewise.
    """

    step: float = 0.0
    group: float = 0.0
    feature: float = 0.0
    id_byte: float = 0.0
    result_byte: float = 0.0
    dense_forward: float = 0.0
    dense_backward: float = 0.0


def program_of(
    plan: Iterable[PlacedTable],
    workload: Workload,
    job: Job,
    model: CostModel,
    host: HostCosts | None = None,
    dense: DenseSteps | None = None,
) -> list[Stage]:
    """Returns a step of training or inference, as `job` says; at a bound above 0 the stages of
    BoundedLagPipeline, with their lags.

    Every exchange is costed as if its ranks had a core each: what they take from each other where
    they have not is the simulation's to find.

    Args:
        plan: where the tables are.
        workload: the tables.
        job: what the plan is for.
        model: of lookups and exchanges.
        host: of what is beside them; nothing by default.
        dense: the model's other layers under DistributedDataParallel; none by default. Their
            backward comes first, and their gradients are waited for last.

    Raises:
        ValueError: a bound above 0 over gloo, whose ranks wait for each other.
    """
    if job.bound > 0 and job.backend != "bls":
        raise ValueError(
            f"bound is {job.bound} over {job.backend}, but only bounded-lag channels have one: "
            "simulate bound 0, or the backend bls"
        )
    step = _Step(plan, workload, job, model, host or HostCosts(), dense or DenseSteps())
    return list(step.stages())


class _Step:
    def __init__(
        self,
        plan: Iterable[PlacedTable],
        workload: Workload,
        job: Job,
        model: CostModel,
        host: HostCosts,
        dense: DenseSteps,
    ) -> None:
        self._job, self._model, self._host, self._dense = job, model, host, dense
        self._groups = groups_of(plan, workload, job)
        self._result_bytes = sum(
            result_bytes(table, workload.reuse_of(table), replace(job, bound=0, training=False))
            for table in workload.tables
        )

    def stages(self) -> Iterator[Stage]:
        bound, training = self._job.bound, self._job.training
        yield Compute("load", self._host.step)
        for number, group in enumerate(self._groups):
            yield Compute("inputs", self._inputs(group))
            yield from self._begin(f"ids {number}", group.ids, 0)
        for number, group in enumerate(self._groups):
            yield from self._finish(f"ids {number}", group.ids, bound)
            yield Compute("lookup", self._lookups(group, "lookup_forward"), lag=bound)
            yield from self._begin(f"embeddings {number}", group.rows, bound)
        for number, group in enumerate(self._groups):
            yield from self._finish(f"embeddings {number}", group.rows, 2 * bound)
        yield Compute("outputs", self._host.result_byte * self._result_bytes, lag=2 * bound)
        forward = self._host.dense_forward + self._dense.forward_us
        yield Compute("dense forward", forward, lag=2 * bound)
        if not training:
            return
        yield Compute("dense backward", self._host.dense_backward)
        yield from self._dense.backward()
        for number, group in reversed(list(enumerate(self._groups))):
            yield from self._begin(f"gradients {number}", group.rows, 0)
            yield from self._finish(f"gradients {number}", group.rows, 0)
            yield Compute("lookup backward", self._lookups(group, "lookup_backward"))
        yield from self._dense.finish()

    def _inputs(self, group: PlanGroup) -> Floats:
        host = self._host
        ids: Floats = group.ids * self._job.ranks
        return host.group + host.feature * group.features + host.id_byte * ids

    def _lookups(self, group: PlanGroup, direction: str) -> Floats:
        lookup = getattr(self._model, direction)
        times = [sum(lookup(works).microseconds for works in ops.values()) for ops in group.works]
        return np.array(times, np.float64)

    def _begin(self, name: str, bytes_per_rank: Floats, lag: int) -> Iterator[Stage]:
        if self._job.ranks == 1:
            return
        if self._job.backend == "bls":
            yield Post(name, self._times(bytes_per_rank) * _PUTS, lag=lag)
            return
        if name.startswith("ids"):
            # Splits, which nothing goes on without, then lengths; values are what is large.
            nothing = np.zeros_like(bytes_per_rank)
            yield Begin(f"{name}: splits", 0.0, self._times(nothing))
            yield Finish(f"{name}: splits")
            yield Begin(f"{name}: lengths", 0.0, self._times(nothing))
        yield Begin(name, 0.0, self._times(bytes_per_rank))

    def _finish(self, name: str, bytes_per_rank: Floats, lag: int) -> Iterator[Stage]:
        if self._job.ranks == 1:
            return
        if self._job.backend == "bls":
            yield Collect(name, self._times(bytes_per_rank) * (1 - _PUTS), lag=lag)
        else:
            yield Finish(name)

    def _times(self, bytes_per_rank: Floats) -> Floats:
        """Returns what an all-to-all takes each rank, as if all ranks had as many bytes as it."""
        ranks = self._job.ranks
        time = partial(self._time_of_even, ranks)
        each, back = np.unique(bytes_per_rank * ranks, return_inverse=True)
        return np.array([time(size) for size in each.tolist()])[back]

    def _time_of_even(self, ranks: int, size: float) -> float:
        even: Sequence[float] = [size] * ranks
        return self._model.all_to_all(even, even, self._job.backend, 1.0).microseconds

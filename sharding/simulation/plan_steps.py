"""What ranks do in a step of a sharded model, from its plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..cost_interface import CostModel
from ..problem.job import Job
from ..problem.plan_groups import PlanGroup, groups_of
from ..problem.shard_traffic import result_bytes
from ..problem.tables import ROW_WISE, TABLE_ROW_WISE, PlacedTable, Workload
from .program import Begin, Collect, Compute, Finish, Post, Stage
from .wire.codecs import FP32, CodecCosts
from .wire.link import Link

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


class _Exchange(NamedTuple):
    """An all-to-all of a step.

    Attributes:
        name: of its channel.
        sizes: (ranks,), bytes of each message to a rank, or else from it.
        to_rank: which of the two.
        encode: microseconds of the senders, before.
        decode: of the receivers, after.
    """

    name: str
    sizes: Floats
    to_rank: bool
    encode: Floats | float = 0.0
    decode: float = 0.0


def codec_on_the_wire(group: PlanGroup, codec: CodecCosts) -> CodecCosts:
    """Returns what the embeddings of a group travel with where `codec` is asked for: over gloo
    pooled tables split by rows are added up on the way, and codes can't be added."""
    split = group.sharding_type in (ROW_WISE, TABLE_ROW_WISE)
    if group.job.backend != "gloo" or not split:
        return codec
    pooled = any(work.pooled for ops in group.works for works in ops.values() for work in works)
    return FP32 if pooled else codec


def program_of(
    plan: Iterable[PlacedTable],
    workload: Workload,
    job: Job,
    model: CostModel,
    host: HostCosts | None = None,
    codec: CodecCosts = FP32,
    link: Link | None = None,
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
        codec: of embeddings; their gradients travel as float32.
        link: of hosts, which messages have to pass.

    Raises:
        ValueError: a bound above 0 over gloo, whose ranks wait for each other.
    """
    if job.bound > 0 and job.backend != "bls":
        raise ValueError(
            f"bound is {job.bound} over {job.backend}, but only bounded-lag channels have one: "
            "simulate bound 0, or the backend bls"
        )
    step = _Step(plan, workload, job, model, host or HostCosts(), codec, link)
    return list(step.stages())


class _Step:
    def __init__(
        self,
        plan: Iterable[PlacedTable],
        workload: Workload,
        job: Job,
        model: CostModel,
        host: HostCosts,
        codec: CodecCosts,
        link: Link | None,
    ) -> None:
        self._job, self._model, self._host = job, model, host
        self._codec, self._link = codec, link
        self._groups = groups_of(plan, workload, job)
        self._result_bytes = sum(
            result_bytes(table, workload.reuse_of(table), replace(job, bound=0, training=False))
            for table in workload.tables
        )

    def stages(self) -> Iterator[Stage]:
        bound, training = self._job.bound, self._job.training
        groups = list(enumerate(self._groups))
        ids = [_Exchange(f"ids {number}", group.ids, True) for number, group in groups]
        rows = [self._embeddings(number, group) for number, group in groups]
        yield Compute("load", self._host.step)
        for number, group in groups:
            yield Compute("inputs", self._inputs(group))
            yield from self._begin(ids[number], 0)
        for number, group in groups:
            yield from self._finish(ids[number], bound)
            yield Compute("lookup", self._lookups(group, "lookup_forward"), lag=bound)
            yield from self._begin(rows[number], bound)
        for number, _ in groups:
            yield from self._finish(rows[number], 2 * bound)
        yield Compute("outputs", self._host.result_byte * self._result_bytes, lag=2 * bound)
        yield Compute("dense forward", self._host.dense_forward, lag=2 * bound)
        if not training:
            return
        yield Compute("dense backward", self._host.dense_backward)
        for number, group in reversed(groups):
            gradients = _Exchange(f"gradients {number}", group.rows, True)
            yield from self._begin(gradients, 0)
            yield from self._finish(gradients, 0)
            yield Compute("lookup backward", self._lookups(group, "lookup_backward"))

    def _embeddings(self, number: int, group: PlanGroup) -> _Exchange:
        codec = codec_on_the_wire(group, self._codec)
        work = codec.encode_us(group), codec.decode_us(group)
        return _Exchange(f"embeddings {number}", codec.row_bytes(group), False, *work)

    def _inputs(self, group: PlanGroup) -> Floats:
        host = self._host
        ids: Floats = group.ids * self._job.ranks
        return host.group + host.feature * group.features + host.id_byte * ids

    def _lookups(self, group: PlanGroup, direction: str) -> Floats:
        lookup = getattr(self._model, direction)
        times = [sum(lookup(works).microseconds for works in ops.values()) for ops in group.works]
        return np.array(times, np.float64)

    def _begin(self, exchange: _Exchange, lag: int) -> Iterator[Stage]:
        if self._job.ranks == 1:
            return
        name, times = exchange.name, self._times(exchange.sizes)
        transfer = self._transfer(exchange)
        if self._job.backend == "bls":
            yield Post(name, exchange.encode + times * _PUTS, lag=lag, transfer=transfer)
            return
        if name.startswith("ids"):
            # Splits, which nothing goes on without, then lengths; values are what is large.
            nothing = np.zeros_like(exchange.sizes)
            yield Begin(f"{name}: splits", 0.0, self._times(nothing))
            yield Finish(f"{name}: splits")
            yield Begin(f"{name}: lengths", 0.0, self._times(nothing))
        yield Begin(name, exchange.encode, times, transfer=transfer)

    def _finish(self, exchange: _Exchange, lag: int) -> Iterator[Stage]:
        if self._job.ranks == 1:
            return
        if self._job.backend == "bls":
            reading = self._times(exchange.sizes) * (1 - _PUTS)
            yield Collect(exchange.name, reading + exchange.decode, lag=lag)
        else:
            yield Finish(exchange.name, exchange.decode)

    def _transfer(self, exchange: _Exchange) -> Floats | float:
        if self._link is None:
            return 0.0
        ranks = self._job.ranks
        sizes = exchange.sizes if exchange.to_rank else exchange.sizes[:, None]
        return self._link.transfer_us(np.broadcast_to(sizes, (ranks, ranks)))

    def _times(self, bytes_per_rank: Floats) -> Floats:
        """Returns what an all-to-all takes each rank, as if all ranks had as many bytes as it."""
        ranks = self._job.ranks
        time = partial(self._time_of_even, ranks)
        each, back = np.unique(bytes_per_rank * ranks, return_inverse=True)
        return np.array([time(size) for size in each.tolist()])[back]

    def _time_of_even(self, ranks: int, size: float) -> float:
        even: Sequence[float] = [size] * ranks
        return self._model.all_to_all(even, even, self._job.backend, 1.0).microseconds

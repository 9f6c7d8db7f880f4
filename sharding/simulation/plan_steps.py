"""What each rank does in a step of a sharded model, made from its plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchrec_bls.rank_steps import (
    Begin,
    Exchange,
    Messages,
    Op,
    PlannedCollective,
    Wait,
    Work,
)

from ..cost_interface import CostModel
from ..costs.host_costs import HostCosts
from ..problem.collectives import Collective, all_to_all_of
from ..problem.job import Job
from ..problem.plan_groups import PlanGroup, groups_of
from ..problem.shard_traffic import result_bytes
from ..problem.tables import COLUMN_WISE, ROW_WISE, TABLE_ROW_WISE, PlacedTable, Workload
from .data_parallel import DenseSteps
from .wire.codecs import FP32, CodecCosts
from .wire.link import TCP_BYTES, Link

Floats = npt.NDArray[np.float64]
Collectives = Sequence[Collective]

# Share of a one-sided exchange's time that the sender's puts take; the receiver's reading is the
# rest.
_PUTS = 0.5
_BY_ROWS = (ROW_WISE, TABLE_ROW_WISE)


class _Exchange(NamedTuple):
    """Collectives of a step, one after the other.

    Attributes:
        name: name of the channel.
        collectives: collectives over a process group; for a channel the all-to-all.
        sizes: (ranks,), bytes of each message to a rank, or else from it.
        to_rank: whether `sizes` are of messages to a rank.
        encode: microseconds of the senders, before.
        decode: microseconds of the receivers, after.
        written: (ranks,), bytes that a rank writes for each rank; None: those of its messages.
    """

    name: str
    collectives: Collectives
    sizes: Floats
    to_rank: bool
    encode: Floats | float = 0.0
    decode: float = 0.0
    written: Floats | None = None


def codec_on_the_wire(group: PlanGroup, codec: CodecCosts) -> CodecCosts:
    """Returns the codec that embeddings of a group really travel with if `codec` is asked for. Over
    gloo it is float32 for pooled tables split by rows: they are added up on the way, and codes
    can't be added."""
    split = group.sharding_type in _BY_ROWS
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
    dense: DenseSteps | None = None,
    codec: CodecCosts = FP32,
    link: Link | None = None,
) -> list[Op]:
    """Returns a step of training or inference, as `job` says.

    At a bound above 0 it has the stages of BoundedLagPipeline, with their lags. Every exchange
    costs as much as if each rank had a core of its own. The simulation finds what ranks that share
    cores take from each other.

    Args:
        plan: places of the tables.
        workload: the tables.
        job: job that the plan is for.
        model: model of lookups and exchanges.
        host: costs beside lookups and exchanges; nothing by default.
        dense: other layers of the model, under DistributedDataParallel; none by default. Their
            backward comes first, and their gradients are waited for last.
        codec: codec of embeddings; their gradients travel as float32.
        link: link of the hosts, which messages have to pass over TCP; none by default.

    Raises:
        ValueError: the bound is above 0 over gloo, whose ranks wait for each other.
    """
    if job.bound > 0 and job.backend != "bls":
        raise ValueError(
            f"bound is {job.bound} over {job.backend}, but only bounded-lag channels have one: "
            "simulate bound 0, or the backend bls"
        )
    host, dense = host or HostCosts(), dense or DenseSteps()
    return list(_Step(plan, workload, job, model, host, dense, codec, link).ops())


class _Step:
    def __init__(
        self,
        plan: Iterable[PlacedTable],
        workload: Workload,
        job: Job,
        model: CostModel,
        host: HostCosts,
        dense: DenseSteps,
        codec: CodecCosts,
        link: Link | None,
    ) -> None:
        self._job, self._model, self._host, self._dense = job, model, host, dense
        self._codec, self._link = codec, link
        channels_over_tcp = link is not None and job.backend == "bls"
        self._carrier = "tcp" if channels_over_tcp else job.backend
        self._groups = groups_of(plan, workload, job)
        self._pooled = {table.module: table.pooled for table in workload.tables}
        # One batch's traffic of each kind.
        once = replace(job, bound=0, training=False)
        self._result_bytes = {True: 0.0, False: 0.0}
        for table in workload.tables:
            size = result_bytes(table, workload.reuse_of(table), once)
            self._result_bytes[table.pooled] += size

    def ops(self) -> Iterator[Op]:
        bound, training = self._job.bound, self._job.training
        groups = list(enumerate(self._groups))
        every = (all_to_all_of(self._job),)
        ids = [_Exchange(f"ids {number}", every, group.ids, True) for number, group in groups]
        rows = [self._embeddings(number, group) for number, group in groups]
        shards = sum(
            np.array([sum(map(len, ops.values())) for ops in group.works]) for group in self._groups
        )
        yield Work(self._host.step + self._host.shard * shards, "load")
        for together in self._called_together():
            for number, group in together:
                yield Work(self._inputs(group), "inputs")
                yield from self._begin(ids[number], 0)
            for number, group in together:
                yield from self._finish(ids[number], bound)
                yield Work(self._lookups(group, "lookup_forward"), "lookup", lag=bound)
                yield from self._begin(rows[number], bound)
        for number, _ in groups:
            yield from self._finish(rows[number], 2 * bound)
        yield Work(self._outputs(), "outputs", lag=2 * bound)
        yield Work(self._dense.forward_us, "dense forward", lag=2 * bound)
        if not training:
            return
        yield from self._dense.backward()
        gradients = [
            _Exchange(f"gradients {number}", group.way.backward, group.rows, True)
            for number, group in groups
        ]
        for number, _ in reversed(groups):
            yield from self._begin(gradients[number], 0)
        for number, group in reversed(groups):
            yield from self._finish(gradients[number], 0)
            yield Work(self._lookups(group, "lookup_backward"), "lookup backward")
        yield from self._dense.finish()

    def _called_together(self) -> list[list[tuple[int, PlanGroup]]]:
        """Returns the groups that are called together, with their numbers: those of each module, or
        all of them where the pipeline calls all modules stage by stage."""
        numbered = list(enumerate(self._groups))
        if self._job.bound > 0:
            return [numbered]
        modules = dict.fromkeys(group.module for group in self._groups)
        return [[each for each in numbered if each[1].module == module] for module in modules]

    def _embeddings(self, number: int, group: PlanGroup) -> _Exchange:
        codec = codec_on_the_wire(group, self._codec)
        work = codec.encode_us(group), codec.decode_us(group)
        name = f"embeddings {number}"
        # An exchange that reads the tables writes rows into slots, or to where they are encoded, as
        # part of its lookup. After FBGEMM's lookup rows are copied, or encoded, into slots.
        written = np.zeros_like(group.rows) if group.read_by_exchange else None
        return _Exchange(name, group.way.forward, codec.row_bytes(group), False, *work, written)

    def _inputs(self, group: PlanGroup) -> Floats:
        host = self._host
        pooled = self._pooled[group.module]
        of_feature = host.feature if pooled else host.feature_unpooled
        looked_up: Floats = group.ids * self._job.ranks
        inputs = host.group + of_feature * group.features + host.id_byte * looked_up
        if group.sharding_type in _BY_ROWS:
            own = group.ids.sum()
            inputs += host.split_group + host.split_id_byte * own
        return inputs

    def _outputs(self) -> float:
        pooled, unpooled = self._result_bytes[True], self._result_bytes[False]
        host = self._host
        columns = [
            float(group.rows.sum())
            for group in self._groups
            if group.sharding_type == COLUMN_WISE and not self._pooled[group.module]
        ]
        return (
            host.result_byte * pooled
            + host.result_byte_unpooled * unpooled
            + host.column_module_unpooled * len(columns)
            + host.column_byte_unpooled * sum(columns)
        )

    def _lookups(self, group: PlanGroup, direction: str) -> Floats:
        lookup = getattr(self._model, direction)
        times = [
            sum(lookup(tuple(works)).microseconds for works in ops.values()) for ops in group.works
        ]
        return np.array(times, np.float64) * self._host.lookup

    def _begin(self, exchange: _Exchange, lag: int) -> Iterator[Op]:
        if self._job.ranks == 1:
            return
        name, (work, pause) = exchange.name, self._times(exchange.sizes, exchange.collectives)
        transfer = self._transfer(exchange)
        if self._job.backend == "bls":
            reading = work * (1 - _PUTS)
            if exchange.written is not None:
                work = self._times(exchange.written, exchange.collectives)[0]
            yield Begin(
                Exchange(name),
                Messages(transfer_us=transfer),
                exchange.encode + work * _PUTS,
                reading + exchange.decode,
                lag,
            )
            return
        if name.startswith("ids"):
            # Splits come first, and nothing goes on without them; then lengths; then values, the
            # large part.
            empty = PlannedCollective(
                *self._times(np.zeros_like(exchange.sizes), exchange.collectives)
            )
            yield Begin(Exchange(f"{name}: splits"), empty, 0.0)
            yield Wait(Exchange(f"{name}: splits"))
            yield Begin(Exchange(f"{name}: lengths"), empty, 0.0)
        by = PlannedCollective(work, pause, transfer_us=transfer)
        yield Begin(Exchange(name), by, exchange.encode, exchange.decode)

    def _finish(self, exchange: _Exchange, lag: int) -> Iterator[Op]:
        if self._job.ranks > 1:
            yield Wait(Exchange(exchange.name), lag)

    def _transfer(self, exchange: _Exchange) -> Floats | float:
        if self._link is None:
            return 0.0
        ranks = self._job.ranks
        sizes = exchange.sizes if exchange.to_rank else exchange.sizes[:, None]
        return self._link.transfer_us(np.broadcast_to(sizes * TCP_BYTES, (ranks, ranks)))

    def _times(self, for_each: Floats, collectives: Collectives) -> tuple[Floats, Floats]:
        """Returns the time of collectives for each rank on a core and on none, as if all ranks had
        as many bytes. Ranks of channels spin while they wait, so that all their time is on a
        core."""
        each, back = np.unique(for_each, return_inverse=True)
        times = np.zeros((len(each), 2))
        for row, size in zip(times, each.tolist(), strict=True):
            for one in collectives:
                time = one.estimate([size] * one.ranks, self._job, self._model, 1.0, self._carrier)
                on_core = 1.0 if self._job.backend == "bls" else time.on_core
                row += time.microseconds * np.array([on_core, 1 - on_core])
        work, pause = (times[back] * self._host.exchange).T
        return work, pause

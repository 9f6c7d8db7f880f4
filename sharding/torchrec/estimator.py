"""The costs of a profile inside TorchRec's own planner."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    ShardEstimator,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ShardingType

from ..cost_interface import AdditiveCosts, LookupWork, TableReuse
from ..costs.profile import check_kind
from ..costs.profiled import ProfiledCosts
from ..problem.collectives import Collective, all_to_all_of, way_of
from ..problem.job import Job
from ..problem.shard_traffic import EMBEDDING_BYTES, shard_traffic
from ..problem.tables import Table, UniformReuse
from ..reuse.table_reuse import TableNames, find_reuse

_MICROSECONDS_PER_MS = 1000.0


class CalibratedShardEstimator(ShardEstimator):  # type: ignore[misc]
    """Fills the `perf` of TorchRec's shards, in milliseconds, from calibrated costs.

    A shard's costs of lookups are its marginal costs, as if nothing else was in its op. Its costs
    of exchanges are the time beyond empty exchanges. So TorchRec's sums over shards make sense. The
    exchange of ids counts as forward communication: TorchRec's total leaves `input_dist_comms` out.

    Args:
        topology: the ranks and their hosts.
        constraints: the user's constraints by name of the table.
        costs: costs on the machine.
        reuse: statistics by table or feature (see find_reuse). None: ids are assumed to
            be drawn uniformly, as many as pooling factors say.
        backend: backend of the exchanges, "gloo" or "bls".
        training: whether there is a backward.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        *,
        costs: AdditiveCosts,
        reuse: Mapping[str, TableReuse] | None = None,
        backend: str = "gloo",
        training: bool = True,
    ) -> None:
        self._topology = topology
        self._constraints = constraints or {}
        self._costs = costs
        self._reuse = reuse or {}
        self._backend = backend
        self._training = training

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """Fills `perf` of every shard. TorchRec's other arguments are unused."""
        tables = {
            (option.path, option.name): TableNames(
                option.path, option.name, option.feature_names or []
            )
            for option in sharding_options
        }
        found, _ = find_reuse(list(tables.values()), self._reuse)
        reuse = dict(zip(tables, found, strict=True))
        for option in sharding_options:
            self._estimate(option, reuse[option.path, option.name])

    def _estimate(self, option: ShardingOption, known: TableReuse | None) -> None:
        rows, dim = option.tensor.shape
        asked = self._constraints.get(option.name)
        table = Table(
            name=option.name,
            rows=rows,
            dim=dim,
            weight_bytes=option.tensor.element_size(),
            features=max(option.num_inputs, 1),
            pooled=option.is_pooled,
            weighted=bool(asked and asked.is_weighted),
        )
        reuse = known or UniformReuse(rows, sum(option.input_lengths))
        world = self._topology.world_size
        job = Job(
            ranks=world,
            batch=option.batch_size,
            memory_bytes=[0] * world,
            ranks_per_host=min(self._topology.local_world_size, world),
            backend=self._backend,
            training=self._training,
        )
        for shard in option.shards:
            if option.sharding_type == ShardingType.DATA_PARALLEL.value:
                shard.perf = self._replica(table, reuse, job)
            else:
                shard.perf = self._shard(table, reuse, job, option.sharding_type, *shard.size)

    def _shard(
        self, table: Table, reuse: TableReuse, job: Job, kind: str, rows: int, columns: int
    ) -> Perf:
        if rows == 0:
            return Perf(0.0, 0.0, 0.0, 0.0)
        way = way_of(job, kind, table.pooled)
        traffic = shard_traffic(table, reuse, job, kind, rows, columns)
        forward, backward = self._lookup(traffic.lookup)
        ids = self._exchange(traffic.ids_per_rank, [all_to_all_of(job)], job)
        return Perf(
            fwd_compute=forward,
            fwd_comms=ids + self._exchange(traffic.rows_per_rank, way.forward, job),
            bwd_compute=backward,
            bwd_comms=self._exchange(traffic.rows_per_rank, way.backward, job),
        )

    def _replica(self, table: Table, reuse: TableReuse, job: Job) -> Perf:
        """Returns the costs of a data-parallel copy: lookups of own samples, and reduced
        gradients."""
        forward, backward = self._lookup(
            LookupWork(
                rows=table.rows,
                dim=table.dim,
                weight_bytes=table.weight_bytes,
                samples=float(job.batch * table.features),
                pooling=reuse.pooling_factor / table.features,
                unique_rows=min(reuse.unique_rows(job.batch), table.rows),
                pooled=table.pooled,
            )
        )
        gradients = table.rows * table.dim * EMBEDDING_BYTES
        reduced = self._costs.all_reduce(gradients, job.ranks, self._backend).microseconds
        return Perf(
            fwd_compute=forward,
            fwd_comms=0.0,
            bwd_compute=backward,
            bwd_comms=reduced / _MICROSECONDS_PER_MS if self._training else 0.0,
        )

    def _lookup(self, work: LookupWork) -> tuple[float, float]:
        forward = float(self._costs.marginal_forward([work])[0])
        backward = float(self._costs.marginal_backward([work])[0]) if self._training else 0.0
        return max(forward, 0.0) / _MICROSECONDS_PER_MS, max(backward, 0.0) / _MICROSECONDS_PER_MS

    def _exchange(self, for_each: float, collectives: Sequence[Collective], job: Job) -> float:
        def time(one: Collective, size: float) -> float:
            each = [size] * one.ranks
            return one.estimate(each, job, self._costs, job.ranks_per_core).microseconds

        beyond = sum(max(time(one, for_each) - time(one, 0.0), 0.0) for one in collectives)
        return beyond / _MICROSECONDS_PER_MS


def calibrated_torchrec_planner(
    topology: Topology,
    batch_size: int,
    constraints: dict[str, ParameterConstraints] | None = None,
    *,
    costs: AdditiveCosts,
    reuse: Mapping[str, TableReuse] | None = None,
    backend: str = "gloo",
    training: bool = True,
) -> EmbeddingShardingPlanner:
    """Returns TorchRec's planner, with times of a `CalibratedShardEstimator`.

    Raises:
        ProfileError: the costs are of another kind of machine than the topology.
    """
    if isinstance(costs, ProfiledCosts):
        check_kind(costs.profile, topology.compute_device)
    calibrated = CalibratedShardEstimator(
        topology, constraints, costs=costs, reuse=reuse, backend=backend, training=training
    )
    storage = EmbeddingStorageEstimator(topology=topology, constraints=constraints)
    enumerator = EmbeddingEnumerator(
        topology, batch_size, constraints, estimator=[calibrated, storage]
    )
    return EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=enumerator,
        constraints=constraints,
        debug=False,
    )

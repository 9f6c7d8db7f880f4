"""The planner for TorchRec's PlannerProvider, which torchrec has from 1.9 on."""

import dataclasses
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.planner.enumerators import get_partition_by_type
from torchrec.distributed.planner.provider import DefaultPlannerProvider
from torchrec.distributed.planner.types import (
    PlannerConfig,
    PlannerSessionContext,
    PlannerVariant,
    Shard,
    ShardingOption,
    ShardingPlanRequest,
    Stats,
    Storage,
    StorageReservation,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from ..cost_interface import AdditiveCosts, TableReuse
from ..costs.profiled import ProfiledCosts
from .estimator import CalibratedShardEstimator
from .planner import BLSShardingPlanner
from .reporter import BLSPlanReporter, PlanReportSink
from .tables import sharded_modules

# Fields of a PlannerConfig that do not configure the search of TorchRec's own planner.
_HEEDED = {
    "planner_variant",
    "storage_reservation_policy",
    "storage_reservation_percentage",
    "parameter_multiplier",
    "dense_tensor_estimate",
    "debug",
}


class BLSPlannerProvider(DefaultPlannerProvider):  # type: ignore[misc]
    """A PlannerProvider of torchrec 1.9 whose planner is BLSShardingPlanner.

    TorchRec makes the topology and the storage reservation, by the request.

    Args:
        costs: costs on the machine, or on several by their SKUs.
        reuse: see BLSShardingPlanner, as for the following arguments.
        backend: backend of the exchanges.
        bound: iterations that ranks may be apart; None: the bound of the bounded-lag sharders.
        training: whether there is a backward.
        cores_per_host: number of cores that the ranks of a host share.
    """

    def __init__(
        self,
        *,
        costs: AdditiveCosts | Mapping[str, AdditiveCosts],
        reuse: Mapping[str, TableReuse] | None = None,
        backend: str | None = None,
        bound: int | None = None,
        training: bool | None = None,
        cores_per_host: int | None = None,
    ) -> None:
        self._costs = costs
        self._options: dict[str, Any] = {
            "reuse": reuse,
            "backend": backend,
            "bound": bound,
            "training": training,
            "cores_per_host": cores_per_host,
        }

    def build_topology(
        self, sku: str, request: ShardingPlanRequest, ctx: PlannerSessionContext
    ) -> Topology:
        """Returns TorchRec's topology. If the request has no device, that of the profile counts."""
        costs = self._costs_of(sku)
        if request.compute_device is None and isinstance(costs, ProfiledCosts):
            request = dataclasses.replace(request, compute_device=costs.profile.machine.kind)
        return super().build_topology(sku, request, ctx)

    def build_planner(
        self,
        sku: str,
        *,
        topology: Topology,
        storage_reservation: StorageReservation,
        ctx: PlannerSessionContext,
    ) -> "_ReportingPlanner":
        """Returns a planner that passes each plan to the session's stats.

        Raises:
            ValueError: the request is for another kind of planner, or there are no costs of `sku`.
            ProfileError: the costs are of another kind of machine than the topology.
        """
        config = ctx.request.planner_config
        if config.planner_variant not in (PlannerVariant.UNSET, PlannerVariant.OSS):
            raise ValueError(
                f"the request asks for planner_variant {config.planner_variant.name}, and "
                "BLSPlannerProvider makes a BLSShardingPlanner: leave it unset"
            )
        ignored = [
            field.name
            for field, usual in zip(
                dataclasses.fields(config), dataclasses.astuple(PlannerConfig()), strict=True
            )
            if field.name not in _HEEDED and getattr(config, field.name) != usual
        ]
        if ignored:
            warnings.warn(
                f"the request's planner_config has {', '.join(ignored)}, which say how TorchRec's "
                "own planner searches; BLSShardingPlanner has another search and goes without",
                stacklevel=3,
            )
        stats = BLSPlanReporter().build_stats(ctx, sku) if ctx.stats is None else ctx.stats
        return _ReportingPlanner(
            stats,
            topology=topology,
            batch_size=ctx.request.batch_size,
            storage_reservation=storage_reservation,
            constraints=ctx.request.constraints,
            costs=self._costs_of(sku),
            **self._options,
        )

    def _costs_of(self, sku: str) -> AdditiveCosts:
        if not isinstance(self._costs, Mapping):
            return self._costs
        if sku not in self._costs:
            raise ValueError(
                f"there are no costs of SKU '{sku}', only of {', '.join(self._costs)}: calibrate "
                "such a machine with `torchrec-bls calibrate` and give its profile"
            )
        return self._costs[sku]


class _ReportingPlanner(BLSShardingPlanner):
    """BLSShardingPlanner with the further methods that TorchRec's executor calls."""

    def __init__(self, stats: Sequence[Stats], **options: Any) -> None:
        super().__init__(**options)
        self._stats = stats
        self._selected: list[ShardingOption] = []

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Returns the plan for `module` and passes it to the stats."""
        self._selected = []
        started = time.perf_counter()
        plan = super().plan(module, sharders)
        seconds = time.perf_counter() - started
        self._selected = list(self._options(module, sharders))
        for sink in self._stats:
            if isinstance(sink, PlanReportSink):
                sink.write(self.report())
                continue
            sink.log(
                sharding_plan=plan,
                topology=self._topology,
                batch_size=self._batch_size,
                storage_reservation=self._reservation,
                num_proposals=1,
                num_plans=1,
                run_time=seconds,
                best_plan=self._selected,
                constraints=self._constraints,
                sharders=sharders,
            )
        return plan

    def get_selected_options(self) -> list[ShardingOption]:
        """Returns the last plan with its shards' costs; empty on ranks that got it from rank 0."""
        return self._selected

    def get_search_space(self) -> None:
        """Returns None, as TorchRec expects from planners that do not list all options."""
        return

    def _options(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> Iterator[ShardingOption]:
        """Yields the last plan as options of TorchRec's own planner.

        Memory is that of weights and optimizer state. Times are those of CalibratedShardEstimator.
        For times of the whole step ask the report.
        """
        assert self._last is not None
        workload, found, _ = self._last
        job = found.placement.problem.job
        in_ddr = job.memory_kind == "DDR"
        estimator = CalibratedShardEstimator(
            self._topology,
            self._constraints,
            costs=self._costs,
            reuse=self._reuse,
            backend=job.backend,
            training=job.training,
        )
        parts = {path: (child, by) for path, child, by in sharded_modules(module, sharders)}
        for placed in found.plan:
            table = placed.table
            child, sharder = parts[table.module]
            ids = workload.reuse_of(table).pooling_factor / table.features
            shards = []
            for shard in placed.shards:
                memory = table.weights_bytes(shard.rows, shard.columns)
                storage = Storage(hbm=0 if in_ddr else memory, ddr=memory if in_ddr else 0)
                size, offset = [shard.rows, shard.columns], [shard.row_offset, shard.column_offset]
                shards.append(Shard(size=size, offset=offset, storage=storage, rank=shard.rank))
            option = ShardingOption(
                name=table.name,
                tensor=sharder.shardable_parameters(child)[table.name],
                module=(table.module, child),
                input_lengths=[ids] * table.features,
                batch_size=self._batch_size,
                sharding_type=placed.sharding_type,
                partition_by=get_partition_by_type(placed.sharding_type),
                compute_kernel=table.kernel,
                shards=shards,
                is_pooled=table.pooled,
            )
            estimator.estimate([option])
            yield option

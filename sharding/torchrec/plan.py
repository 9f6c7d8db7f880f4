"""Converts plans of this package to TorchRec's plans, and back."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import placement
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)

from ..problem import plan_file
from ..problem.tables import (
    COLUMN_WISE,
    KERNEL,
    SHARDING_TYPES,
    TABLE_ROW_WISE,
    PlacedShard,
    PlacedTable,
    Table,
    Workload,
)

# Sharding by columns within each host. Its predicted time is that of column-wise sharding.
_AS_COLUMN_WISE = "table_column_wise"


def to_sharding_plan(
    plan: Iterable[PlacedTable],
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints] | None = None,
) -> ShardingPlan:
    """Returns `plan` for DistributedModelParallel.

    The plan also passes on what `constraints` say of the tables' kernels (cache, rounding, ...).
    """
    modules: dict[str, EmbeddingModuleShardingPlan] = {}
    for placed in plan:
        asked = (constraints or {}).get(placed.table.name) or ParameterConstraints()
        shards = [
            ShardMetadata(
                shard_sizes=[shard.rows, shard.columns],
                shard_offsets=[shard.row_offset, shard.column_offset],
                placement=placement(topology.compute_device, shard.rank, topology.local_world_size),
            )
            for shard in placed.shards
        ]
        module = modules.setdefault(placed.table.module, EmbeddingModuleShardingPlan())
        module[placed.table.name] = ParameterSharding(
            sharding_type=placed.sharding_type,
            compute_kernel=placed.table.kernel,
            ranks=[shard.rank for shard in placed.shards],
            sharding_spec=EnumerableShardingSpec(shards),
            cache_params=asked.cache_params,
            enforce_hbm=asked.enforce_hbm,
            stochastic_rounding=asked.stochastic_rounding,
            bounds_check_mode=asked.bounds_check_mode,
            output_dtype=asked.output_dtype,
            key_value_params=asked.key_value_params,
        )
    return ShardingPlan(modules)


def from_sharding_plan(plan: ShardingPlan, workload: Workload) -> tuple[PlacedTable, ...]:
    """Returns TorchRec's plan of the tables of `workload`, for rating.

    Raises:
        ValueError: the plan lacks a table, or shards one in a way that can't be rated.
    """
    placed = []
    for table in workload.tables:
        parameter = dict(plan.plan.get(table.module, {})).get(table.name)
        if parameter is None:
            raise ValueError(f"the plan has no table '{table.name}' of module '{table.module}'")
        kind = parameter.sharding_type
        if kind not in (*SHARDING_TYPES, _AS_COLUMN_WISE):
            raise ValueError(f"table '{table.name}' is sharded {kind}, which can't be rated")
        shards = tuple(
            PlacedShard(rank, *metadata.shard_sizes, *metadata.shard_offsets)
            for rank, metadata in zip(parameter.ranks, parameter.sharding_spec.shards, strict=True)
            if metadata.shard_sizes[0] > 0
        )
        placed.append(PlacedTable(table, COLUMN_WISE if kind == _AS_COLUMN_WISE else kind, shards))
    return tuple(placed)


def save_plan(plan: ShardingPlan, path: str | Path, *, world_size: int) -> None:
    """Writes TorchRec's plan as JSON, for `load_plan` and the commands of torchrec-bls.

    Args:
        plan: any plan of TorchRec, no matter who made it.
        path: the file to write.
        world_size: number of ranks that the plan is for; the plan itself does not say it.

    Raises:
        ValueError: the plan shards a table in a way that our planner does not know.
        OSError: the file can't be written.
    """
    tables = [
        Table(name, *_extent(parameter), module=module)
        for module, parameters in plan.plan.items()
        for name, parameter in dict(parameters).items()
    ]
    # A table that is split among the ranks of a host has a shard on each of them.
    per_host = {
        len(parameter.ranks)
        for parameters in plan.plan.values()
        for parameter in dict(parameters).values()
        if parameter.sharding_type == TABLE_ROW_WISE
    }
    if len(per_host) > 1:
        raise ValueError(
            f"tables are split among {sorted(per_host)} ranks of a host, not one number"
        )
    placed = from_sharding_plan(plan, Workload(tables))
    plan_file.save_plan(Path(path), placed, world_size, next(iter(per_host), None))


def _extent(parameter: ParameterSharding) -> tuple[int, int]:
    """Returns rows and columns of a table, from its shards."""
    shards = [] if parameter.sharding_spec is None else parameter.sharding_spec.shards
    ends = [
        [offset + size for offset, size in zip(s.shard_offsets, s.shard_sizes, strict=True)]
        for s in shards
    ]
    # A table without shards is refused later, by its sharding type and its name.
    return (max(rows for rows, _ in ends), max(dim for _, dim in ends)) if ends else (1, 1)


def load_plan(
    path: str | Path,
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    *,
    kernel: str = KERNEL,
) -> ShardingPlan:
    """Returns the plan of a file, for DistributedModelParallel.

    Args:
        path: a file of `save_plan`, or of `torchrec-bls plan --save`.
        topology: the ranks and their hosts.
        constraints: see `to_sharding_plan`.
        kernel: compute kernel of all tables, "fused_uvm" for outputs on GPUs.

    Raises:
        PlanFileError: the file is no such file, or the plan is for another number of ranks or of
            ranks on each host.
        OSError: the file can't be read.
    """
    saved = plan_file.read_plan(Path(path))
    ranks = topology.world_size
    saved.check_shape(ranks, min(topology.local_world_size, ranks), str(path))
    tables = [
        replace(placed, table=replace(placed.table, kernel=kernel)) for placed in saved.tables
    ]
    return to_sharding_plan(tables, topology, constraints)

"""The tables of a TorchRec model, with the sharding types that sharders and constraints allow."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
)
from torchrec.distributed.types import ModuleSharder
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from ..cost_interface import TableReuse
from ..problem.tables import (
    DEFAULT_MIN_COLUMNS,
    KERNEL,
    SHARDING_TYPES,
    TABLE_ROW_WISE,
    Table,
    UniformReuse,
    Workload,
)
from ..reuse.table_reuse import TableNames, find_reuse

# Bytes of optimizer state for each row and for each weight, by FBGEMM's name of the optimizer.
_OPTIMIZER_BYTES = {
    "exact_sgd": (0, 0),
    "sgd": (0, 0),
    "exact_row_wise_adagrad": (4, 0),
    "exact_adagrad": (0, 4),
    "adam": (0, 8),
    "lamb": (0, 8),
    "partial_row_wise_adam": (4, 4),
    "partial_row_wise_lamb": (4, 4),
    "lars_sgd": (0, 4),
}
_UNKNOWN_OPTIMIZER_BYTES = (0, 8)

# TorchRec's words for tables in host memory whose outputs are on a GPU.
FOR_GPUS = {EmbeddingComputeKernel.FUSED_UVM.value, EmbeddingComputeKernel.QUANT_UVM.value}
# TorchRec's default for a user who sets no pooling factor.
_UNSET_POOLING = [1.0]


def workload_of(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    compute_device: str,
    hosts: int,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    reuse: Mapping[str, TableReuse] | None = None,
) -> Workload:
    """Returns the tables of `module` that `sharders` shard, with their statistics.

    Args:
        module: a model, with EmbeddingBagCollections and EmbeddingCollections somewhere inside.
        sharders: TorchRec's sharders or the bounded-lag ones.
        compute_device: "cpu" or "cuda".
        hosts: number of hosts; table-row-wise sharding makes no difference on a single one.
        constraints: the user's constraints by name of the table.
        reuse: statistics by table or feature (see find_reuse). For a table without them
            the pooling factors of its constraints, or 1, and uniformly drawn ids are assumed. One
            warning names such tables, another one statistics that belong to no table.

    Raises:
        PlannerError: constraints contradict each other, the sharder or the tables.
        ValueError: there are no tables.
    """
    constraints = constraints or {}
    tables: list[Table] = []
    names: list[TableNames] = []
    for path, child, sharder in sharded_modules(module, sharders):
        for name, parameter in sharder.shardable_parameters(child).items():
            asked = constraints.get(name) or ParameterConstraints()
            config = _config(path, child, name)
            tables.append(
                _table(path, child, config, sharder, parameter, asked, compute_device, hosts)
            )
            names.append(TableNames(path, name, config.feature_names))
    known = {table.name for table in tables}
    strange = sorted(set(constraints) - known)
    if strange and tables:
        raise _contradiction(f"constraints name tables that no sharder shards: {strange}")
    found, strange = find_reuse(names, reuse or {})
    if strange and tables:
        warnings.warn(
            f"reuse statistics of no table or feature, or of a name that several tables have: "
            f"{strange}. They are by 'module.table', by a table's name or by feature",
            stacklevel=4,
        )
    return Workload(tables, _statistics(tables, constraints, found))


def sharded_modules(
    module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]
) -> Iterator[tuple[str, nn.Module, ModuleSharder[nn.Module]]]:
    """Yields path, module and sharder of every part of `module` that one of `sharders` shards."""
    by_type = {sharder.module_type: sharder for sharder in sharders}
    waiting = [("", module)]
    while waiting:
        path, child = waiting.pop(0)
        sharder = by_type.get(type(child))
        if sharder is not None:
            yield path, child, sharder
        else:
            dot = "." if path else ""
            waiting.extend((f"{path}{dot}{name}", inner) for name, inner in child.named_children())


def _kernel(sharder: Any, compute_device: str) -> str:
    """Returns the compute kernel of a sharder's tables: one of FOR_GPUS if it offers no other,
    and else KERNEL."""
    offered = {
        kernel
        for sharding_type in sharder.sharding_types(compute_device)
        if sharding_type in SHARDING_TYPES
        for kernel in sharder.compute_kernels(sharding_type, compute_device)
    }
    return offered.pop() if len(offered) == 1 and offered <= FOR_GPUS else KERNEL


def _config(path: str, module: Any, name: str) -> Any:
    if hasattr(module, "embedding_bag_configs"):
        configs = module.embedding_bag_configs()
    elif hasattr(module, "embedding_configs"):
        configs = module.embedding_configs()
    else:
        raise _contradiction(
            f"'{path}' is a {type(module).__name__}: the planner knows EmbeddingBagCollection and "
            "EmbeddingCollection"
        )
    return next(config for config in configs if config.name == name)


def _table(
    path: str,
    module: Any,
    config: Any,
    sharder: Any,
    parameter: nn.Parameter,
    asked: ParameterConstraints,
    compute_device: str,
    hosts: int,
) -> Table:
    name, pooled = config.name, hasattr(module, "embedding_bag_configs")
    rows, dim = parameter.shape
    if asked.batch_sizes:
        raise _contradiction(f"table '{name}': batch sizes per feature can't be planned for")
    if asked.device_group and asked.device_group != compute_device:
        raise _contradiction(
            f"table '{name}': device group '{asked.device_group}', but the topology is of "
            f"{compute_device}"
        )
    if asked.min_partition is not None and not 0 < asked.min_partition <= dim:
        raise _contradiction(
            f"table '{name}': min_partition is {asked.min_partition}, but it has {dim} columns"
        )
    per_row, per_weight = _OPTIMIZER_BYTES.get(
        optimizer_of(sharder, parameter), _UNKNOWN_OPTIMIZER_BYTES
    )
    kernel = _kernel(sharder, compute_device)
    return Table(
        name=name,
        rows=rows,
        dim=dim,
        module=path,
        weight_bytes=parameter.element_size(),
        features=max(len(config.feature_names), 1),
        pooled=pooled,
        weighted=bool(pooled and module.is_weighted()),
        optimizer_bytes_per_row=per_row,
        optimizer_bytes_per_weight=per_weight,
        kernel=kernel,
        sharding_types=_types(name, sharder, asked, kernel, compute_device, hosts),
        min_columns=asked.min_partition or DEFAULT_MIN_COLUMNS,
    )


def _types(
    name: str,
    sharder: Any,
    asked: ParameterConstraints,
    kernel: str,
    compute_device: str,
    hosts: int,
) -> tuple[str, ...]:
    """Returns the sharding types that a table can have with the kernel."""
    if asked.compute_kernels and kernel not in asked.compute_kernels:
        raise _contradiction(
            f"table '{name}': constraints ask for the kernels {asked.compute_kernels}, the planner "
            f"has the costs of '{kernel}' only. Add it to compute_kernels, or plan with TorchRec's "
            "EmbeddingShardingPlanner"
        )
    if asked.key_value_params is not None:
        raise _contradiction(
            f"table '{name}': constraints have key_value_params, for tables on SSD, and the "
            f"planner has the costs of '{kernel}' only. Leave them out, or plan with TorchRec's "
            "EmbeddingShardingPlanner"
        )
    offered = [
        sharding_type
        for sharding_type in sharder.sharding_types(compute_device)
        if sharding_type in SHARDING_TYPES
        and kernel in sharder.compute_kernels(sharding_type, compute_device)
    ]
    types = [t for t in offered if not asked.sharding_types or t in asked.sharding_types]
    if not types:
        raise _contradiction(
            f"table '{name}': constraints ask for {asked.sharding_types}, "
            f"{type(sharder).__name__} and the planner have {offered}"
        )
    if hosts == 1 and types != [TABLE_ROW_WISE]:
        types = [t for t in types if t != TABLE_ROW_WISE]
    return tuple(types)


def optimizers_of(
    module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]
) -> frozenset[str]:
    """Returns `optimizer_of` every table of `module` that `sharders` shard."""
    return frozenset(
        optimizer_of(sharder, parameter)
        for _, child, sharder in sharded_modules(module, sharders)
        for parameter in sharder.shardable_parameters(child).values()
    )


def optimizer_of(sharder: Any, parameter: nn.Parameter) -> str:
    """Returns FBGEMM's name of a table's optimizer, "unknown" for one that TorchRec doesn't fuse.

    This follows TorchRec's order: what `apply_optimizer_in_backward` left at the parameter, then
    the sharder's fused_params, then FBGEMM's default.
    """
    (kwargs,) = getattr(parameter, "_optimizer_kwargs", [{}])
    (optimizer_class,) = getattr(parameter, "_optimizer_classes", [None])
    fused = getattr(sharder, "fused_params", None) or {}
    optimizer = kwargs.get("optimizer")
    if optimizer is None and optimizer_class is not None:
        try:
            optimizer = optimizer_type_to_emb_opt_type(optimizer_class)
        except ValueError:
            return "unknown"
    optimizer = optimizer or fused.get("optimizer") or "exact_sgd"
    return str(getattr(optimizer, "value", optimizer))


def _statistics(
    tables: Sequence[Table],
    constraints: Mapping[str, ParameterConstraints],
    found: Sequence[TableReuse | None],
) -> dict[str, TableReuse]:
    statistics: dict[str, TableReuse] = {}
    assumed = []
    for table, known in zip(tables, found, strict=True):
        if known is not None:
            statistics[table.path] = known
            continue
        asked = constraints.get(table.name)
        pooling = asked.pooling_factors if asked else _UNSET_POOLING
        if len(pooling) != table.features and pooling != _UNSET_POOLING:
            raise _contradiction(
                f"table '{table.name}' has {table.features} features, but its constraints "
                f"{len(pooling)} pooling factors"
            )
        factor = sum(pooling) if len(pooling) == table.features else float(table.features)
        statistics[table.path] = UniformReuse(table.rows, factor)
        assumed.append(table.name)
    if assumed:
        some = ", ".join(assumed[:5]) + (", ..." if len(assumed) > 5 else "")
        warnings.warn(
            f"no reuse statistics for {len(assumed)} of {len(tables)} tables ({some}): taken are "
            "the pooling factors of their constraints, or 1 id a feature, drawn uniformly. "
            "ReuseStatistics.from_batches makes some",
            stacklevel=5,
        )
    return statistics


def _contradiction(message: str) -> PlannerError:
    return PlannerError(message, PlannerErrorType.STRICT_CONSTRAINTS)

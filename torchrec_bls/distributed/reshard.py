"""Moves the shards of a module to other ranks, with their rows and optimizer states.

TorchRec's own `update_shards` is not used, for two reasons. It sends with tags that are Python
hashes of strings. They differ from process to process, so that receivers over gloo wait until they
time out. And it keeps data that follows from the old order of features. If that order changes, rows
are wrong.
"""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer

from torchrec_bls.collective.transport.rank_names import rank_name
from torchrec_bls.distributed.exchanges.plan_agreement import Agreement, terms_of
from torchrec_bls.distributed.module_state import ModuleExchanges
from torchrec_bls.distributed.output_device import gpu_of_outputs
from torchrec_bls.distributed.outputs.lookup_tables import NAME_THE_FUSED_KERNEL

_PREFIX = "embedding_bags."

# Weights, then optimizer states, by table, first row and first column.
Tensors = dict[tuple[str, int, int], list[torch.Tensor]]


@dataclass(frozen=True)
class Block:
    """Rows and columns of a table on a rank.

    Attributes:
        rank: rank that has them.
        rows: rows within the table.
        columns: columns within the table.
    """

    rank: int
    rows: range
    columns: range

    def overlap(self, other: "Block") -> "Block | None":
        """Returns the part that both blocks have, or None."""
        rows = range(max(self.rows.start, other.rows.start), min(self.rows.stop, other.rows.stop))
        columns = range(
            max(self.columns.start, other.columns.start),
            min(self.columns.stop, other.columns.stop),
        )
        return Block(self.rank, rows, columns) if rows and columns else None

    def cut(self, tensor: torch.Tensor, part: "Block") -> torch.Tensor:
        """Returns the view of `part`.

        Args:
            tensor: [rows, columns] of this block, or [rows].
            part: part of this block.
        """
        first = part.rows.start - self.rows.start
        view = tensor[first : first + len(part.rows)]
        if view.dim() == 2:
            first = part.columns.start - self.columns.start
            view = view[:, first : first + len(part.columns)]
        return view


def reshard(
    module: Any,
    changed: Mapping[str, ParameterSharding],
    env: ShardingEnv,
    device: torch.device | None,
) -> None:
    """Moves shards to other ranks or cuts them otherwise, collectively and between two batches.

    A rank that fails keeps the old plan. If others have the new plan then, the next batch reports
    it.

    Args:
        module: a BLSEmbeddingBagCollection.
        changed: new plan of the tables that change.
        env: the environment that the module was sharded with.
        device: the module's device.

    Raises:
        ValueError: the change is not possible, or batches are under way.
        RendezvousError: another rank has refused the change, or was given a different one.
    """
    plan = module.module_sharding_plan
    wanted = {**plan, **changed}
    agreement = _agreement(module, wanted, "reshard")
    try:
        _check_change(module, changed, env, device)
    except ValueError as error:
        agreement.fail(f"{rank_name(module._bls.exchanges.group)} refuses to reshard: {error}")
        raise
    agreement.reach()
    # The next batch compares the plan, even if this rank does not get to the new one.
    as_before = _agreement(module, plan)
    module._bls.forget_plan(as_before)
    rates = _learning_rates(module._lookups, module._bls.exchanges.group)
    source = _local_tensors(module._lookups)
    before = _snapshot(module)
    try:
        kept = _rebuild(module, changed)
        target = _local_tensors(module._lookups)
        for table in module._table_names:
            if plan[table].sharding_type not in kept:
                old, new = _blocks_of(plan[table]), _blocks_of(wanted[table])
                _move(table, old, new, source, target, module._bls.exchanges.group)
        _set_learning_rates(module._lookups, rates)
        module._bls.forget_plan(_agreement(module, wanted))
    except BaseException:
        vars(module).clear()
        vars(module).update(before)
        module._bls.forget_plan(as_before)
        raise


def _agreement(module: Any, plan: Mapping[str, ParameterSharding], what: str = "") -> Agreement:
    exchanges: ModuleExchanges = module._bls.exchanges
    terms = terms_of(exchanges.config, module._embedding_bag_configs, plan)
    name = f"{exchanges.name} {what}".rstrip()
    return Agreement(exchanges.group, name, exchanges.deadline, terms)


def _snapshot(module: nn.Module) -> dict[str, Any]:
    return {
        name: copy(value) if name in ("_modules", "_parameters", "_buffers") else value
        for name, value in vars(module).items()
    }


def _blocks_of(planned: ParameterSharding) -> list[Block]:
    """Returns the shards of a table that is not replicated."""
    spec: Any = planned.sharding_spec
    return [
        Block(
            rank,
            *(
                range(first, first + size)
                for first, size in zip(shard.shard_offsets, shard.shard_sizes, strict=True)
            ),
        )
        for rank, shard in zip(planned.ranks or [], spec.shards, strict=True)
    ]


def _check_change(
    module: Any,
    changed: Mapping[str, ParameterSharding],
    env: ShardingEnv,
    device: torch.device | None,
) -> None:
    if gpu_of_outputs(device) is not None:
        raise ValueError("shards do not move where outputs are on a GPU: shard the model anew")
    if env.process_group is not module._bls.exchanges.group:
        raise ValueError("reshard with the ShardingEnv that the module was sharded with")
    if module.under_way:
        raise ValueError(
            "batches are under way, whose ids are on the ranks of the old plan: wait for their "
            "outputs, or call the pipeline's progress until it raises StopIteration"
        )
    world_size = module._bls.exchanges.group.size()
    held = _local_tensors(module._lookups)
    for name, new in changed.items():
        old = module.module_sharding_plan.get(name)
        if old is None:
            raise ValueError(f"table '{name}' is not one of the module's: {module._table_names}")
        if (old.sharding_type, old.compute_kernel) != (new.sharding_type, new.compute_kernel):
            raise ValueError(
                f"table '{name}' would change from {old.sharding_type} with the "
                f"{old.compute_kernel} kernel to {new.sharding_type} with the {new.compute_kernel} "
                "kernel, but only ranks and cuts can change: load a checkpoint into a model that "
                "is sharded anew"
            )
        if old.compute_kernel != "fused":
            raise ValueError(
                f"table '{name}' has the {old.compute_kernel} kernel, whose optimizer is outside "
                "of the module and would go on with the old shards: shard the model with the "
                f"fused kernel. To get it, {NAME_THE_FUSED_KERNEL}"
            )
        table = module._table_name_to_config[name]
        _check_blocks(name, _blocks_of(new), table.num_embeddings, table.embedding_dim, world_size)
        cuts = {block.columns for block in _blocks_of(old)}
        rowwise = any(
            tensor.dim() == 1
            for key, tensors in held.items()
            if key[0] == name
            for tensor in tensors
        )
        if rowwise and {block.columns for block in _blocks_of(new)} != cuts:
            raise ValueError(
                f"table '{name}' would be cut into other columns, but its optimizer has one state "
                "for all columns of a shard, which can't be split or merged: keep the widths"
            )


def _check_blocks(name: str, blocks: list[Block], rows: int, columns: int, world_size: int) -> None:
    area = sum(len(block.rows) * len(block.columns) for block in blocks)
    apart = not any(a.overlap(b) for i, a in enumerate(blocks) for b in blocks[i + 1 :])
    inside = all(
        block.rows.stop <= rows and block.columns.stop <= columns and 0 <= block.rank < world_size
        for block in blocks
    )
    if not (apart and inside and area == rows * columns):
        raise ValueError(
            f"the shards planned for table '{name}' of {rows} x {columns} do not cover it once, or "
            f"ranks are not below {world_size}: {blocks}"
        )


def _local_tensors(lookups: Iterable[nn.Module]) -> Tensors:
    """Returns weights and optimizer states of the fused shards on this rank, as views."""
    return {
        (table.name, *table.local_metadata.shard_offsets): [weights, *states.values()]
        for kernel in _fused_kernels(lookups)
        for table, weights, states in zip(
            kernel._config.embedding_tables,
            kernel.emb_module.split_embedding_weights(),
            # Optimizers without states have nothing at all here.
            kernel.emb_module.get_optimizer_state() or repeat({}),
            strict=False,
        )
    }


def _rebuild(module: Any, changed: Mapping[str, ParameterSharding]) -> set[str]:
    """Makes shards, lookups and dists of the new plan, without their rows.

    Returns the types of the shardings without a changed table. They keep their lookups.
    """
    module.module_sharding_plan = {**module.module_sharding_plan, **changed}
    infos = module.sharding_type_to_sharding_infos
    touched = {planned.sharding_type for planned in changed.values()}
    module.sharding_type_to_sharding_infos = {
        kind: [
            replace(info, param_sharding=module.module_sharding_plan[info.embedding_config.name])
            for info in of_kind
        ]
        for kind, of_kind in infos.items()
    }
    shardings, lookups = list(module._embedding_shardings), list(module._lookups)
    for index, kind in enumerate(module._sharding_types):
        if kind in touched:
            shardings[index] = module.create_embedding_bag_sharding(
                module.sharding_type_to_sharding_infos[kind],
                module._env,
                module._device,
                permute_embeddings=True,
                qcomm_codecs_registry=module.qcomm_codecs_registry,
            )
            lookups[index] = shardings[index].create_lookup()
    module._embedding_shardings, module._lookups = shardings, lookups
    _forget_dists(module)
    module._create_output_dist()
    # The rows come from the old shards. New lookups would lose the rows of those that stay.
    module.reset_parameters = lambda: None
    try:
        module._initialize_torch_state(skip_registering=True)
    finally:
        del module.reset_parameters
    module._optim = CombinedOptimizer([("", optim) for optim in _optimizers(lookups)])
    return set(module._sharding_types) - touched


def _forget_dists(module: Any) -> None:
    """Empties the lists that TorchRec appends to. The next batch makes the input dists again."""
    module._has_uninitialized_input_dist = module._has_features_permute = True
    module._inverse_indices_permute_indices = None
    module._kjt_key_indices = {}
    for name in (
        "_input_dists",
        "_output_dists",
        "_features_order",
        "_feature_splits",
        "_embedding_names",
        "_embedding_dims",
        "_uncombined_embedding_names",
        "_uncombined_embedding_dims",
    ):
        setattr(module, name, [])


def _optimizers(lookups: Iterable[nn.Module]) -> list[Any]:
    found = []
    for lookup in lookups:
        for kernel in lookup.modules():
            if isinstance(kernel, FusedOptimizerModule):
                optimizer: Any = kernel.fused_optimizer
                optimizer.params = {
                    name if name.startswith(_PREFIX) else _PREFIX + name: parameter
                    for name, parameter in optimizer.params.items()
                }
                found.append(optimizer)
    return found


def _learning_rates(
    lookups: Iterable[nn.Module], group: dist.ProcessGroup
) -> dict[str, tuple[float, float]]:
    """Returns, collectively, the learning rates by table: the optimizer's, and FBGEMM's of its last
    step."""
    own = {
        table.name: (
            kernel.fused_optimizer.param_groups[0]["lr"],
            kernel.emb_module.get_learning_rate(),
        )
        for kernel in _fused_kernels(lookups)
        for table in kernel._config.embedding_tables
    }
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, own, group=group)
    return {name: rates for of_rank in gathered for name, rates in of_rank.items()}


def _set_learning_rates(
    lookups: Iterable[nn.Module], rates: Mapping[str, tuple[float, float]]
) -> None:
    for kernel in _fused_kernels(lookups):
        of_optimizer, of_fbgemm = rates[kernel._config.embedding_tables[0].name]
        kernel.fused_optimizer.param_groups[0]["lr"] = of_optimizer
        kernel.emb_module.set_learning_rate(of_fbgemm)


def _fused_kernels(lookups: Iterable[nn.Module]) -> list[Any]:
    return [
        kernel
        for lookup in lookups
        for kernel in getattr(lookup, "_emb_modules", [])
        if isinstance(kernel, FusedOptimizerModule)
    ]


def _move(
    table: str,
    old: list[Block],
    new: list[Block],
    source: Tensors,
    target: Tensors,
    group: dist.ProcessGroup,
) -> None:
    """Collectively copies a table, with its optimizer states, from old shards to new ones.

    Args:
        table: name of the table.
        old: old shards, on all ranks.
        new: new shards, on all ranks.
        source: tensors of this rank's old shards.
        target: tensors of this rank's new shards.
        group: group of the ranks.
    """
    rank = group.rank()
    outgoing: list[list[torch.Tensor]] = [[] for _ in range(group.size())]
    incoming: list[list[torch.Tensor]] = [[] for _ in range(group.size())]
    leaves = False
    for after in new:
        for before in old:
            part = after.overlap(before)
            if part is None:
                continue
            leaves |= before.rank != after.rank
            if before.rank == rank:
                outgoing[after.rank] += _parts(table, before, part, source)
            if after.rank == rank:
                incoming[before.rank] += _parts(table, after, part, target)
    if leaves:
        _exchange(outgoing, incoming, group)
    else:
        for place, piece in zip(incoming[rank], outgoing[rank], strict=True):
            place.copy_(piece)


def _parts(table: str, block: Block, part: Block, tensors: Tensors) -> list[torch.Tensor]:
    held = tensors[table, block.rows.start, block.columns.start]
    return [block.cut(tensor, part) for tensor in held]


def _exchange(
    outgoing: list[list[torch.Tensor]],
    incoming: list[list[torch.Tensor]],
    group: dist.ProcessGroup,
) -> None:
    empty = torch.empty(0, dtype=torch.uint8)
    sent = [piece.reshape(-1).view(torch.uint8) for pieces in outgoing for piece in pieces]
    sizes = [[place.nbytes for place in places] for places in incoming]
    received = torch.empty(sum(map(sum, sizes)), dtype=torch.uint8)
    dist.all_to_all_single(
        received,
        torch.cat([empty, *sent]),
        [sum(of_rank) for of_rank in sizes],
        [sum(piece.nbytes for piece in pieces) for pieces in outgoing],
        group=group,
    )
    places = [place for of_rank in incoming for place in of_rank]
    pieces = torch.split(received, [size for of_rank in sizes for size in of_rank])
    for place, piece in zip(places, pieces, strict=True):
        # A copy has the alignment that the type needs.
        place.copy_(piece.clone().view(place.dtype).view(place.shape))

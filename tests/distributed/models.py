"""Small embedding modules, their sharding and their batches, the same on every rank."""

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import (
    EnumerableShardingSpec,
    LazyAwaitable,
    ModuleSharder,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardMetadata,
)

from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BLSEmbeddingCollectionSharder,
)
from torchrec_bls.distributed.sharder import BoundedLagSharder

CPU = torch.device("cpu")
SGD = {"learning_rate": 0.1}

# Five tables: table-wise on 8 ranks, three ranks have none. f0 is looked up in two tables.
FEATURES = [f"f{i}" for i in range(5)]
ROWS = [41, 50, 57, 64, 71]
DIMS = [8, 16, 8, 16, 8]
SHARED = {3: ["f3", "f0"]}


@dataclass(frozen=True)
class Kind:
    """A module to shard.

    Attributes:
        name: "ec", "ebc" (sum and mean pooling) or "weighted" (an EBC, sum pooling).
        features: one table each; the first of `FEATURES`.
    """

    name: str
    tables: int = len(FEATURES)

    @property
    def features(self) -> list[str]:
        return FEATURES[: self.tables]

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        if self.name == "ec":
            return EmbeddingCollection(
                tables=[
                    EmbeddingConfig(
                        num_embeddings=ROWS[i],
                        embedding_dim=8,
                        name=f"t{i}",
                        feature_names=self._features_of(i),
                    )
                    for i in range(self.tables)
                ]
            )
        return EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    num_embeddings=ROWS[i],
                    embedding_dim=DIMS[i],
                    name=f"t{i}",
                    feature_names=self._features_of(i),
                    pooling=PoolingType.MEAN if i % 2 and self.name == "ebc" else PoolingType.SUM,
                )
                for i in range(self.tables)
            ],
            is_weighted=self.name == "weighted",
        )

    def _features_of(self, table: int) -> list[str]:
        return SHARED.get(table, [FEATURES[table]])

    def torchrec_sharder(self, fused_params: dict[str, Any] | None = None) -> ModuleSharder[Any]:
        sharder = EmbeddingCollectionSharder if self.name == "ec" else EmbeddingBagCollectionSharder
        return sharder(fused_params=fused_params or SGD)

    def bls_sharder(
        self, config: BLSConfig, fused_params: dict[str, Any] | None = None
    ) -> ModuleSharder[Any]:
        sharder = (
            BLSEmbeddingCollectionSharder if self.name == "ec" else BLSEmbeddingBagCollectionSharder
        )
        return sharder(fused_params or SGD, config=config)


EC, EBC, WEIGHTED = Kind("ec"), Kind("ebc"), Kind("weighted")
MIXES = {
    "ec": ["table_wise", "row_wise", "column_wise"],
    "ebc": ["table_wise", "row_wise", "column_wise", "table_row_wise"],
    "weighted": ["table_wise", "row_wise", "column_wise", "table_row_wise"],
}


def sharding_types(kind: Kind, sharding: str, nodes: int) -> list[str]:
    """Returns the sharding type of each table; `sharding` is one of them or "mixed"."""
    if sharding != "mixed":
        return [sharding] * kind.tables
    mix = [s for s in MIXES[kind.name] if s != "table_row_wise" or nodes > 1]
    return [mix[i % len(mix)] for i in range(kind.tables)]


def set_nodes(nodes: int) -> None:
    """Makes TorchRec believe that the ranks are spread over `nodes` hosts; before any sharding."""
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size() // nodes)


def _generator(sharding_type: str, table: int, world_size: int, nodes: int) -> Callable[..., Any]:
    if sharding_type == "table_wise":
        return table_wise(rank=table % world_size, compute_kernel="fused")
    if sharding_type == "row_wise":
        return row_wise(compute_kernel="fused")
    if sharding_type in ("column_wise", "table_column_wise"):
        ranks = [(table + 1) % world_size, table % world_size]
        return column_wise(ranks=ranks, compute_kernel="fused")
    if sharding_type == "grid_shard":
        return _grid(world_size, nodes)
    if sharding_type == "data_parallel":
        return data_parallel()
    return table_row_wise(host_index=table % nodes)


def _grid(world_size: int, nodes: int) -> Callable[..., ParameterSharding]:
    """As TorchRec's grid_shard, which cuts no columns of tables as small as these."""

    def generate(table: nn.Parameter, *_: object) -> ParameterSharding:
        local_size = world_size // nodes
        columns, block = table.shape[1] // nodes, -(-table.shape[0] // local_size)
        shards = [
            ShardMetadata(
                shard_sizes=[max(0, min(block, table.shape[0] - block * local)), columns],
                shard_offsets=[min(block * local, table.shape[0]), columns * node],
                placement=f"rank:{node * local_size + local}/cpu",
            )
            for node in range(nodes)
            for local in range(local_size)
        ]
        return ParameterSharding(
            "grid_shard", "fused", list(range(world_size)), EnumerableShardingSpec(shards)
        )

    return generate


def make_plan(
    module: nn.Module,
    types: Sequence[str],
    sharder: ModuleSharder[Any],
    nodes: int = 1,
    world_size: int | None = None,
    device: torch.device = CPU,
) -> Any:
    """Returns the plan that shards table i by `types[i]`, with fused kernels where there are."""
    world_size = world_size or dist.get_world_size()
    plan = construct_module_sharding_plan(
        module,
        {f"t{i}": _generator(s, i, world_size, nodes) for i, s in enumerate(types)},
        sharder=sharder,
        world_size=world_size,
        local_size=world_size // nodes,
        device_type=device.type,
    )
    fused = "fused" if device == CPU else "fused_uvm"
    for parameter, sharding_type in zip(plan.values(), types, strict=True):
        # TorchRec has no generator for table_column_wise, whose plans look alike.
        parameter.sharding_type = sharding_type
        # Most generators have no argument for it.
        parameter.compute_kernel = "dense" if sharding_type == "data_parallel" else fused
    return plan


@dataclass
class Batch:
    """What a data loader gives: pipelines find the ids as its attribute."""

    ids: KeyedJaggedTensor


class SparseOnly(nn.Module):
    """An embedding module and nothing else, called with a batch."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, batch: Batch) -> Any:
        return self.embeddings(batch.ids)


def shard(
    kind: Kind,
    sharding: str,
    sharder: ModuleSharder[Any],
    nodes: int = 1,
    device: torch.device = CPU,
) -> DistributedModelParallel:
    """Returns the module of `kind`, sharded, with the weights of the unsharded one."""
    module = kind.module()
    types = sharding_types(kind, sharding, nodes)
    plan = make_plan(module, types, sharder, nodes, device=device)
    return shard_model(SparseOnly(module), {"embeddings": plan}, [sharder], device)


def shard_model(
    model: nn.Module,
    plans: dict[str, Any],
    sharders: list[ModuleSharder[Any]],
    device: torch.device = CPU,
) -> DistributedModelParallel:
    """Shards `model`; gives TorchRec's own shards, too, the weights it had."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sharded = DistributedModelParallel(
        copy.deepcopy(model),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan(plans),
        sharders=sharders,
        init_data_parallel=device == CPU,  # replicas of dense layers would move to the GPU
    )
    if not all(isinstance(sharder, BoundedLagSharder) for sharder in sharders):
        for name, (rows, columns, shard) in local_shards(sharded).items():
            shard.copy_(weights[name.partition(" ")[0]][rows, columns])
        for name, replica in replicas(sharded).items():
            replica.copy_(weights[name])
    return sharded


def replicas(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tables that every rank has whole."""
    return {
        name: value.detach()
        for name, value in model.state_dict().items()
        if type(value) in (torch.Tensor, nn.Parameter)
    }


def local_shards(
    model: DistributedModelParallel,
) -> dict[str, tuple[slice, slice, torch.Tensor]]:
    """Returns rows, columns and weights of each shard on this rank by table and number."""
    shards = {}
    for name, value in model.state_dict().items():
        if not hasattr(value, "local_shards"):
            continue
        for i, shard in enumerate(value.local_shards()):
            (row, column), (rows, columns) = (
                shard.metadata.shard_offsets,
                shard.metadata.shard_sizes,
            )
            shards[f"{name} {i}"] = (
                slice(row, row + rows),
                slice(column, column + columns),
                shard.tensor.detach(),
            )
    return shards


def make_ids(
    kind: Kind,
    seed: int,
    samples: int,
    *,
    dtype: torch.dtype = torch.int64,
    most_ids: int = 3,
    without: Sequence[str] = (),
) -> KeyedJaggedTensor:
    """Draws 0 to `most_ids` ids per sample and feature, none for the features in `without`."""
    generator = torch.Generator().manual_seed(seed)
    lengths, values = [], []
    for feature in kind.features:
        most = 0 if feature in without else most_ids
        lengths.append(torch.randint(most + 1, (samples,), generator=generator, dtype=torch.int32))
        # f0 is looked up in two tables, of which the smaller one is its own.
        rows = ROWS[FEATURES.index(feature)]
        values.append(
            torch.randint(rows, (int(lengths[-1].sum()),), generator=generator, dtype=dtype)
        )
    ids = torch.cat(values)
    weights = torch.rand(len(ids), generator=generator) if kind.name == "weighted" else None
    return KeyedJaggedTensor(kind.features, ids, weights, torch.cat(lengths))


def arrived(output: Any) -> Any:
    """Waits for the output of a sharded module; only once for each."""
    return output.wait() if isinstance(output, LazyAwaitable) else output


def flatten(output: Any) -> dict[str, torch.Tensor]:
    """Returns what an EC or EBC gives, waited for, as detached tensors by name."""
    output = arrived(output)
    if isinstance(output, KeyedTensor):
        keys, values = output.keys(), output.values()
        assert values.shape[1] == sum(output.length_per_key())
        return {f"{'|'.join(keys)} {output.length_per_key()}": values.detach().clone()}
    flat = {}
    for name, jagged in output.items():
        flat[f"{name} values"] = jagged.values().detach().clone()
        flat[f"{name} lengths"] = jagged.lengths().to(torch.int64).clone()
    return flat


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Compares tensors by name, bit by bit."""
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        other = theirs[name]
        assert tensor.dtype == other.dtype and tensor.shape == other.shape, name
        if tensor.is_floating_point():
            difference = (tensor - other).abs().max() if tensor.numel() else 0
            tensor, other = tensor.view(torch.int32), other.view(torch.int32)
            assert torch.equal(tensor, other), f"{name} differs, by {difference} at most"
        else:
            assert torch.equal(tensor, other), f"{name} differs"

"""TorchRec's modules around an embedding module, and its two-dimensional sharding."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.itep_embeddingbag import ITEPEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.types import (
    ModuleSharder,
    ShardingEnv,
    ShardingEnv2D,
    ShardingPlan,
)
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from tests.distributed import models
from tests.distributed.results.test_training import loss_of
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import BLSConfig

# TorchRec's feature processors cannot do a feature that is looked up twice.
PLAIN, TO_WEIGH = models.Kind("ebc", 3), models.Kind("weighted", 3)
MIXES = {
    "table-wise": ["table_wise"] * 3,
    "row-wise": ["row_wise"] * 3,
    "table-row-wise": ["table_row_wise"] * 3,
    "mixed": ["column_wise", "row_wise", "data_parallel"],
}


def processed(as_collection: bool) -> FeatureProcessedEmbeddingBagCollection:
    most_ids = dict.fromkeys(TO_WEIGH.features, 9)
    processors: Any = (
        PositionWeightedModuleCollection(most_ids)
        if as_collection
        else {f: PositionWeightedModule(max_feature_length=n) for f, n in most_ids.items()}
    )
    module = FeatureProcessedEmbeddingBagCollection(TO_WEIGH.module(), processors)
    for name, parameter in module.named_parameters():
        if "embedding_bags" not in name:
            nn.init.uniform_(parameter)
    return module


def processed_outputs(
    rank: int, module: nn.Module, mix: str, ebc_sharder: ModuleSharder[Any]
) -> dict[str, torch.Tensor]:
    """Trains three steps and infers; returns all outputs and the processors' parameters."""
    sharder = FeatureProcessedEmbeddingBagCollectionSharder(ebc_sharder)
    plan = models.make_plan(module, MIXES[mix], sharder, 2)
    model = models.shard_model(models.SparseOnly(module), {"embeddings": plan}, [sharder])
    processors = [p for name, p in model.named_parameters() if "embedding_bags" not in name]
    assert processors
    optimizer = torch.optim.SGD(processors, lr=0.1)
    results = {}
    for step in range(3):
        output = models.arrived(model(models.Batch(models.make_ids(PLAIN, 10 * rank + step, 4))))
        loss_of(output).backward()
        optimizer.step()
        optimizer.zero_grad()
        results |= {f"{step} {name}": tensor for name, tensor in models.flatten(output).items()}
    with torch.no_grad():
        for step in range(3):
            output = models.arrived(
                model(models.Batch(models.make_ids(PLAIN, 10 * rank + step, 6, most_ids=8)))
            )
            results |= {f"later {step} {name}": t for name, t in models.flatten(output).items()}
    return results | {str(i): p.detach() for i, p in enumerate(processors)}


def process_features(rank: int) -> None:
    models.set_nodes(2)
    for mix, as_collection in product(MIXES, (True, False)):
        torch.manual_seed(1)
        module = processed(as_collection)
        theirs = processed_outputs(rank, module, mix, TO_WEIGH.torchrec_sharder())
        ours = processed_outputs(rank, module, mix, TO_WEIGH.bls_sharder(BLSConfig()))
        models.assert_same_bits(ours, theirs)


def test_feature_processed_collections_are_torchrecs() -> None:
    run(2, process_features, deadline=120)


def read_processed_features(rank: int) -> None:
    models.set_nodes(2)
    mixes = {**MIXES, "mixed": ["column_wise", "row_wise", "table_wise"]}
    for mix, as_collection in product(mixes, (True, False)):
        torch.manual_seed(1)
        module = processed(as_collection)
        outputs = []
        for inner in (
            TO_WEIGH.torchrec_sharder(),
            TO_WEIGH.bls_sharder(BLSConfig(lookup="direct")),
        ):
            sharder = FeatureProcessedEmbeddingBagCollectionSharder(inner)
            plan = models.make_plan(module, mixes[mix], sharder, 2)
            model = models.shard_model(models.SparseOnly(module), {"embeddings": plan}, [sharder])
            with torch.no_grad():
                # New ones for each: row-wise, TorchRec writes positions to a batch.
                batches = [models.make_ids(PLAIN, 9 * rank + i, 4, most_ids=8) for i in range(3)]
                outputs.append(
                    [models.flatten(models.arrived(model(models.Batch(ids)))) for ids in batches]
                )
        assert model.module.embeddings._embedding_bag_collection.reads_directly
        with torch.no_grad():
            samples = 0 if rank else 3
            output = models.arrived(model(models.Batch(models.make_ids(PLAIN, 0, samples))))
            assert len(output.values()) == samples
            bad = models.make_ids(PLAIN, 1, 4)
            bad.values()[0] = 10_000
            with pytest.raises(ValueError, match="id 10000 at position 0 of feature 'f0'"):
                models.arrived(model(models.Batch(bad)))
        theirs, ours = outputs
        for output, wanted in zip(ours, theirs, strict=True):
            models.assert_same_bits(output, wanted)


def test_processed_features_are_read_directly() -> None:
    run(2, read_processed_features, deadline=120)


def sharded_by(
    module: nn.Module, types: Sequence[str], sharder: ModuleSharder[Any]
) -> DistributedModelParallel:
    return DistributedModelParallel(
        models.SparseOnly(module),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=models.CPU,
        plan=ShardingPlan({"embeddings": models.make_plan(module, types, sharder)}),
        sharders=[sharder],
    )


def managed(kind: models.Kind) -> nn.Module:
    module: Any = kind.module()
    tables = module.embedding_configs() if kind is models.EC else module.embedding_bag_configs()
    collisions = {
        table.name: MCHManagedCollisionModule(
            zch_size=table.num_embeddings,
            device=models.CPU,
            eviction_policy=DistanceLFU_EvictionPolicy(),
            eviction_interval=2,
            input_hash_size=1000,
        )
        for table in tables
    }
    around: Callable[..., nn.Module] = (
        ManagedCollisionEmbeddingCollection
        if kind is models.EC
        else ManagedCollisionEmbeddingBagCollection
    )
    return around(module, ManagedCollisionCollection(collisions, tables))


def manage_collisions(rank: int) -> None:
    for kind, around in (
        (models.EC, ManagedCollisionEmbeddingCollectionSharder),
        (models.EBC, ManagedCollisionEmbeddingBagCollectionSharder),
    ):
        sharded_by(managed(kind), ["row_wise"] * 5, around(kind.torchrec_sharder()))
        with pytest.raises(ValueError, match="is sharded inside of a ManagedCollision module"):
            sharded_by(managed(kind), ["row_wise"] * 5, around(kind.bls_sharder(BLSConfig())))


def test_managed_collisions_are_refused_at_sharding() -> None:
    run(2, manage_collisions)


def prune(rank: int) -> None:
    for inner in (models.EBC.torchrec_sharder(), models.EBC.bls_sharder(BLSConfig())):
        pruning = GenericITEPModule({f"t{i}": 100 for i in range(5)})
        module = ITEPEmbeddingBagCollection(models.EBC.module(), pruning)
        with pytest.raises(AttributeError, match="'fbgemm' object has no attribute 'init_address_"):
            sharded_by(module, ["table_wise"] * 5, ITEPEmbeddingBagCollectionSharder(inner))


def test_torchrecs_pruning_has_no_cpu_code_and_says_so_at_sharding() -> None:
    """Where it has, ids are those of the table before it was pruned, and out of range here."""
    run(2, prune)


def environment_2d(rank: int, width: int) -> ShardingEnv2D:
    """As DMPCollection makes it, which itself refuses CPU: groups of `width` shard a replica."""
    replicas = dist.get_world_size() // width
    mesh = torch.arange(width * replicas).view(width, replicas).T
    groups = [dist.new_group(ranks) for ranks in mesh.tolist()]
    across = [dist.new_group(ranks) for ranks in mesh.T.tolist()]
    return ShardingEnv2D(
        sharding_pg=groups[rank % replicas],
        replica_pg=across[rank // replicas],
        global_pg=dist.group.WORLD,
        device_mesh=DeviceMesh("cpu", mesh),
        node_group_size=width,
    )


def plan_2d(rank: int, kind: models.Kind, types: list[str], sharder: ModuleSharder[Any]) -> Any:
    """Returns the plan of this rank's replica, in the ranks of the world."""
    replicas = dist.get_world_size() // 2
    plan = models.make_plan(kind.module(), types, sharder, world_size=2)
    for parameter in plan.values():
        if parameter.sharding_spec is None:
            continue
        parameter.ranks = [replicas * each + rank % replicas for each in parameter.ranks]
        for shard, world_rank in zip(parameter.sharding_spec.shards, parameter.ranks, strict=True):
            shard.placement = torch.distributed._remote_device(f"rank:{world_rank}/cpu")
    return plan


def shard_in_two_dimensions(rank: int, kind: models.Kind) -> None:
    env = environment_2d(rank, 2)
    for sharding in ("table_wise", "row_wise", "column_wise"):
        compare_in_two_dimensions(rank, kind, env, [sharding] * 5)
    mix = ["row_wise", "table_wise", "row_wise", "column_wise", "table_wise"]
    compare_in_two_dimensions(rank, kind, env, mix)


def compare_in_two_dimensions(
    rank: int, kind: models.Kind, env: ShardingEnv2D, types: list[str]
) -> None:
    module = kind.module()
    results = []
    for sharder in (kind.torchrec_sharder(), kind.bls_sharder(BLSConfig())):
        plan = plan_2d(rank, kind, types, sharder)
        sharded = sharder.shard(module, plan, env, models.CPU, "-".join(types))
        with torch.no_grad():
            for name, table in sharded.state_dict().items():
                whole = module.state_dict()[name]
                local = table.to_local()
                # Where there is no shard, there is an offset all the same.
                for shard, (row, column) in zip(
                    local.local_shards(), local.local_offsets(), strict=False
                ):
                    shard.copy_(whole[row : row + len(shard), column : column + shard.shape[1]])
        outputs = {}
        for step in range(3):
            output = models.arrived(sharded(models.make_ids(kind, 10 * rank + step, 4)))
            loss_of(output).backward()
            outputs |= {f"{step} {name}": value for name, value in models.flatten(output).items()}
        with torch.no_grad():
            later = models.flatten(sharded(models.make_ids(kind, rank, 3)))
        results.append(outputs | later)
    models.assert_same_bits(results[1], results[0])


@pytest.mark.parametrize(
    "kind", slow_but([models.EBC], [models.EC, models.EBC]), ids=lambda kind: kind.name
)
def test_sharding_in_two_dimensions_is_torchrecs(kind: models.Kind) -> None:
    run(4, shard_in_two_dimensions, kind, deadline=120)

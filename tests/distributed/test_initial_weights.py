"""A sharded module starts from the weights of the module that it was made of."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType

from tests.distributed import models
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import BLSConfig

KINDS = {kind.name: kind for kind in (models.EC, models.EBC, models.WEIGHTED)}
NODES = 2


def sharded(
    kind: models.Kind,
    module: nn.Module,
    plan: Any,
    device: torch.device = models.CPU,
) -> DistributedModelParallel:
    return DistributedModelParallel(
        models.SparseOnly(module),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({"embeddings": plan}),
        sharders=[kind.bls_sharder(BLSConfig())],
    )


def plan_of(kind: models.Kind, module: nn.Module, sharding: str) -> Any:
    types = models.sharding_types(kind, sharding, NODES)
    return models.make_plan(module, types, kind.bls_sharder(BLSConfig()), NODES)


def assert_weights(model: DistributedModelParallel, module: nn.Module) -> None:
    whole = {f"embeddings.{name}": tensor for name, tensor in module.state_dict().items()}
    found = models.local_shards(model)
    # Pieces behind each other in one tensor, TorchRec's fused storage, are easily mixed up.
    assert found, "every rank has shards of these plans"
    for name, (rows, columns, shard) in found.items():
        assert torch.equal(shard, whole[name.partition(" ")[0]][rows, columns]), name


def compare_shards(rank: int) -> None:
    models.set_nodes(NODES)
    for kind in KINDS.values():
        for sharding in [*models.MIXES[kind.name], "mixed"]:
            module = kind.module()
            plan = plan_of(kind, module, sharding)
            assert_weights(sharded(kind, copy.deepcopy(module), plan), module)


def test_of_every_sharding_type() -> None:
    run(4, compare_shards)


def compare_odd_shards(rank: int) -> None:
    for kind in (models.EC, models.EBC):
        module: Any = kind.module()
        configs = (
            module.embedding_configs() if kind is models.EC else module.embedding_bag_configs()
        )
        for config in configs:
            config.data_type, config.embedding_dim = DataType.FP16, 16
        module = type(module)(tables=configs)
        # Two shards of a table on one rank, which TorchRec keeps as one tensor.
        plan = construct_module_sharding_plan(
            module,
            {
                config.name: column_wise(ranks=[i % 2, 0, 1, i % 2], compute_kernel="fused")
                for i, config in enumerate(configs)
            },
            sharder=kind.bls_sharder(BLSConfig()),
            world_size=2,
            local_size=2,
            device_type="cpu",
        )
        assert_weights(sharded(kind, copy.deepcopy(module), plan), module)


def start_on_the_meta_device(rank: int, kind: models.Kind) -> None:
    models.set_nodes(NODES)
    module = kind.module()
    meta = copy.deepcopy(module).to("meta")
    meta._device = torch.device("meta")  # as if it had been made there
    model = sharded(kind, copy.deepcopy(meta), plan_of(kind, module, "mixed"))
    whole = {f"embeddings.{name}": tensor for name, tensor in module.state_dict().items()}
    model.load_state_dict(whole)
    assert_weights(model, module)
    ids = models.make_ids(kind, rank, 4)
    with torch.no_grad():
        output = models.flatten(model(models.Batch(ids)))
        expected = sharded(kind, copy.deepcopy(module), plan_of(kind, module, "mixed"))
        models.assert_same_bits(output, models.flatten(expected(models.Batch(ids))))

    moved = meta.to_empty(device="cpu")
    moved.load_state_dict(module.state_dict())
    assert moved.device.type == "meta"  # still
    assert_weights(sharded(kind, moved, plan_of(kind, module, "mixed")), module)


@pytest.mark.parametrize("kind", slow_but(["weighted"], KINDS))
def test_of_a_module_made_on_the_meta_device(kind: str) -> None:
    run(2, start_on_the_meta_device, KINDS[kind])


def start_from_other_seeds(rank: int, kind: models.Kind) -> None:
    """As a program that makes its model before it sets the same seed on all ranks."""
    models.set_nodes(1)
    modules = [kind.module() for _ in range(2)]
    with torch.no_grad():
        for parameter in modules[1].parameters():
            parameter.neg_()
    types = ["data_parallel", "table_wise", "data_parallel", "row_wise", "table_wise"]
    sharder = kind.bls_sharder(BLSConfig())
    plan = models.make_plan(modules[rank], types, sharder)
    model = sharded(kind, copy.deepcopy(modules[rank]), plan)
    found = models.replicas(model)
    assert len(found) == 2
    for name, table in found.items():
        assert torch.equal(table, modules[0].state_dict()[name.removeprefix("embeddings.")]), name
    assert_weights(model, modules[rank])
    ids = models.make_ids(kind, 1, 4)
    with torch.no_grad():
        output = models.arrived(model(models.Batch(ids)))["f2"]
        first = [torch.empty_like(output) for _ in range(2)]
        dist.all_gather(first, output)
    assert torch.equal(*first)


@pytest.mark.parametrize("kind", slow_but(["ebc"], ["ebc", "weighted"]))
def test_tables_that_all_ranks_have_are_the_first_ranks(kind: str) -> None:
    run(2, start_from_other_seeds, KINDS[kind])


def shard_to_the_meta_device(rank: int, kind: models.Kind) -> None:
    models.set_nodes(NODES)
    module = kind.module()
    with pytest.raises(ValueError, match=r"device .*meta.*device\('cpu'\)"):
        sharded(kind, module, plan_of(kind, module, "mixed"), torch.device("meta"))


@pytest.mark.parametrize("kind", slow_but(["ec"], KINDS))
def test_shards_on_the_meta_device_are_refused(kind: str) -> None:
    run(2, shard_to_the_meta_device, KINDS[kind])


def test_of_half_precision_and_several_shards_on_a_rank() -> None:
    run(2, compare_odd_shards)

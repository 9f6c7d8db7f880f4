"""What examples and tutorials teach gives the unsharded model's answers under every plan.

A sharded collection orders its keys by sharding type and rank, and not as the module does. A model
that takes the columns as they come is right under some plans only.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan

from tests.examples.taught_models import (
    TINY,
    collection_of,
    make_arguments,
    make_model,
    taught_models,
)
from tests.processes import run
from torchrec_bls import BLSConfig, BLSEmbeddingBagCollectionSharder, bounded_lag_channels

CPU = torch.device("cpu")
PROGRAMS = taught_models()
#: Makes the plan of table number i of n, on a number of ranks.
Generator = Callable[[int, int, int], Any]


def in_reverse(i: int, tables: int, ranks: int) -> Any:
    return table_wise(rank=(tables - 1 - i) % ranks, compute_kernel="fused")


def by_rows(i: int, tables: int, ranks: int) -> Any:
    return row_wise(compute_kernel="fused")


def by_columns(i: int, tables: int, ranks: int) -> Any:
    return column_wise(ranks=[(i + 1) % ranks, i % ranks], compute_kernel="fused")


def on_each(i: int, tables: int, ranks: int) -> Any:
    return data_parallel()


def plans(rows: Sequence[int]) -> dict[str, list[Generator]]:
    """Returns how each table is sharded, by the name of the plan."""
    mixed = (by_columns, in_reverse, by_rows)
    return {
        "owners reversed": [in_reverse] * len(rows),
        "row-wise": [by_rows] * len(rows),
        "column-wise": [by_columns] * len(rows),
        "tiny on each rank": [on_each if each == TINY else in_reverse for each in rows],
        "mixed": [mixed[i % len(mixed)] for i in range(len(rows))],
    }


def shard(
    model: nn.Module, generators: Sequence[Generator], sharder: Any
) -> DistributedModelParallel:
    path, collection = collection_of(model)
    ranks, names = dist.get_world_size(), list(collection.embedding_bags)
    plan = construct_module_sharding_plan(
        collection,
        {
            name: generate(i, len(names), ranks)
            for i, (name, generate) in enumerate(zip(names, generators, strict=True))
        },
        sharder=sharder,
        world_size=ranks,
        local_size=ranks,
        device_type="cpu",
    )
    sharded = DistributedModelParallel(
        copy.deepcopy(model),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan({path: plan}),
        sharders=[sharder],
        init_data_parallel=False,
    )
    sharded.load_state_dict(model.state_dict())  # TorchRec's own shards are random at first
    return sharded.eval()


def sharders_for(plan: str) -> dict[str, Any]:
    sharders = {
        "TorchRec": EmbeddingBagCollectionSharder(),
        "exchange": BLSEmbeddingBagCollectionSharder(config=BLSConfig()),
    }
    if plan != "tiny on each rank":  # a sharding type that direct reads do not have
        sharders["direct"] = BLSEmbeddingBagCollectionSharder(config=BLSConfig(lookup="direct"))
    return sharders


@torch.no_grad()
def find_wrong_answers(rank: int, programs: dict[str, str]) -> tuple[list[str], set[str]]:
    """Returns what gives other answers than the unsharded model, and which plans changed keys."""
    wrong, reordered = [], set()
    for name, program in programs.items():
        model = make_model(program)
        arguments = make_arguments(model, program, seed=rank)
        expected = model(*arguments)
        configs = collection_of(model)[1].embedding_bag_configs()
        rows = [config.num_embeddings for config in configs]
        for plan, generators in plans(rows).items():
            for way, sharder in sharders_for(plan).items():
                sharded = shard(model, generators, sharder)
                answer = sharded(*arguments)
                answer = answer.wait() if hasattr(answer, "wait") else answer
                if not torch.allclose(answer, expected, rtol=1e-4, atol=1e-5):
                    wrong.append(f"{name}, {plan}, {way}")
                (keys,) = (
                    module._embedding_names
                    for module in sharded.modules()
                    if hasattr(module, "_embedding_names")
                )
                if keys != [config.feature_names[0] for config in configs]:
                    reordered.add(plan)
                if way != "TorchRec":
                    for channel in bounded_lag_channels(sharded):
                        channel.close()
    return wrong, reordered


def test_all_taught_models_are_found() -> None:
    assert set(PROGRAMS) == {
        "checkpoints/ranker.py",
        "examples/dlrm.py",
        "examples/quickstart.py",
        "first-model/first_model.py",
        "new-weights/served.py",
        "overlap/overlapped.py",
        "quantized/quantized.py",
        "refresh-a-service/ranker.py",
        "serve-a-model/ranker.py",
        "unmodified-torchrec/unmodified.py",
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_taught_models_are_right_under_every_plan(ranks: int) -> None:
    for wrong, reordered in run(ranks, find_wrong_answers, PROGRAMS, deadline=300.0):
        assert wrong == []
        # Otherwise columns as they come would have been right, too.
        assert reordered >= {"owners reversed", "mixed"}

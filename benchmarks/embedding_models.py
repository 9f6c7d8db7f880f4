"""The sharded modules that the embedding benchmark compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BLSEmbeddingCollectionSharder,
)

TABLES = 26
ROWS = 20_000
DIM = 64
FEATURES = [f"feature_{i}" for i in range(TABLES)]

Forward = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One combination.

    Attributes:
        module: "EC" (EmbeddingCollection) or "EBC" (EmbeddingBagCollection).
        sharding: "table_wise" or "row_wise".
        ranks: number of processes.
        batch: samples per rank.
    """

    module: str
    sharding: str
    ranks: int
    batch: int


def ids_of(case: Case, rank: int) -> KeyedJaggedTensor:
    """One uniformly drawn id for each feature and sample."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(ROWS, (TABLES * case.batch,), generator=generator)
    return KeyedJaggedTensor(
        keys=FEATURES, values=values, lengths=torch.ones_like(values, dtype=torch.int32)
    )


def build(case: Case, ids: KeyedJaggedTensor) -> tuple[Forward, Forward, Forward]:
    """Returns the forwards of TorchRec's sharded module, of ours, and the lookup alone."""
    if case.module == "EC":
        config: Any = EmbeddingConfig
        whole: Any = EmbeddingCollection
        sharders = (
            EmbeddingCollectionSharder(),
            BLSEmbeddingCollectionSharder(BLSConfig()),
        )
    else:
        config, whole = EmbeddingBagConfig, EmbeddingBagCollection
        sharders = (
            EmbeddingBagCollectionSharder(),
            BLSEmbeddingBagCollectionSharder(BLSConfig()),
        )
    tables = [
        config(name=f"table_{i}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[feature])
        for i, feature in enumerate(FEATURES)
    ]
    torch.manual_seed(0)
    module = whole(tables=tables)
    theirs, ours = (_shard(module, case, sharder) for sharder in sharders)
    context = ours.create_context()
    local_ids = ours.input_dist(context, ids).wait().wait()
    # An exchange of embeddings answers each exchange of ids.
    _result(ours.compute_and_output_dist(context, local_ids))
    return (
        lambda: _result(theirs(ids)),
        lambda: _result(ours(ids)),
        lambda: [
            lookup(features) for lookup, features in zip(ours._lookups, local_ids, strict=True)
        ],
    )


def _result(awaitable: Any) -> object:
    return awaitable.wait()


def _shard(module: Any, case: Case, sharder: Any) -> Any:
    kernel = EmbeddingComputeKernel.FUSED.value
    generators = {
        f"table_{i}": (
            table_wise(rank=i % case.ranks, compute_kernel=kernel)
            if case.sharding == "table_wise"
            else row_wise(compute_kernel=kernel)
        )
        for i in range(TABLES)
    }
    plan = construct_module_sharding_plan(
        module,
        generators,
        sharder=sharder,
        local_size=case.ranks,
        world_size=case.ranks,
        device_type="cpu",
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return sharder.shard(module, plan, env, torch.device("cpu"), f"{case}")

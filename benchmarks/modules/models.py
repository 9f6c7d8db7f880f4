"""The sharded modules that are compared: 26 tables of 20,000 rows, dimension 64."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness.launch import slowest
from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BLSEmbeddingCollectionSharder,
)

TABLES = 26
ROWS = 20_000
DIM = 64
FEATURES = [f"feature_{i}" for i in range(TABLES)]

SHARDINGS = ("table_wise", "row_wise", "column_wise")

Forward = Callable[[], object]

_FORWARDS_PER_SAMPLE = 5

_MODULES: dict[str, Any] = {
    "EC": (EmbeddingConfig, EmbeddingCollection),
    "EBC": (EmbeddingBagConfig, EmbeddingBagCollection),
}
_THEIRS = {"EC": EmbeddingCollectionSharder, "EBC": EmbeddingBagCollectionSharder}
_OURS: dict[str, Any] = {
    "EC": BLSEmbeddingCollectionSharder,
    "EBC": BLSEmbeddingBagCollectionSharder,
}


@dataclass(frozen=True)
class Case:
    """One combination.

    Attributes:
        module: "EC" (EmbeddingCollection) or "EBC" (EmbeddingBagCollection).
        sharding: "table_wise", "row_wise" or "column_wise".
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
    ours = _shard(case, _OURS[case.module](BLSConfig()), dist.group.WORLD)
    context = ours.create_context()
    local_ids = ours.input_dist(context, ids).wait().wait()
    # An exchange of embeddings answers each exchange of ids.
    _result(ours.compute_and_output_dist(context, local_ids))
    return (
        build_torchrec(case, ids, dist.group.WORLD),
        lambda: _result(ours(ids)),
        lambda: [
            lookup(features) for lookup, features in zip(ours._lookups, local_ids, strict=True)
        ],
    )


def build_torchrec(case: Case, ids: KeyedJaggedTensor, group: dist.ProcessGroup) -> Forward:
    """Returns the forward of TorchRec's own sharded module over `group`."""
    module = _shard(case, _THEIRS[case.module](), group)
    return lambda: _result(module(ids))


def forward_ms(forward: Forward) -> float:
    """Milliseconds of a forward on the slowest rank, of a few back to back."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(_FORWARDS_PER_SAMPLE):
        forward()
    return slowest((time.perf_counter() - start) / _FORWARDS_PER_SAMPLE * 1e3)


def _result(awaitable: Any) -> object:
    return awaitable.wait()


def _unsharded(case: Case) -> Any:
    config, whole = _MODULES[case.module]
    tables = [
        config(name=f"table_{i}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[feature])
        for i, feature in enumerate(FEATURES)
    ]
    torch.manual_seed(0)
    return whole(tables=tables)


def _shard(case: Case, sharder: Any, group: dist.ProcessGroup) -> Any:
    module = _unsharded(case)
    kernel = EmbeddingComputeKernel.FUSED.value
    both = [[i % case.ranks, (i + 1) % case.ranks] for i in range(TABLES)]
    generators: dict[str, Any] = {
        "table_wise": lambda i: table_wise(rank=i % case.ranks, compute_kernel=kernel),
        "row_wise": lambda _: row_wise(compute_kernel=kernel),
        "column_wise": lambda i: column_wise(ranks=both[i], compute_kernel=kernel),
    }
    plan = construct_module_sharding_plan(
        module,
        {f"table_{i}": generators[case.sharding](i) for i in range(TABLES)},
        sharder=sharder,
        local_size=case.ranks,
        world_size=case.ranks,
        device_type="cpu",
    )
    env = ShardingEnv.from_process_group(group)
    return sharder.shard(module, plan, env, torch.device("cpu"), f"{case}")

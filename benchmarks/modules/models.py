"""The sharded modules that are compared: 26 tables of 20,000 rows, dimension 64."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torchrec.distributed import sharding_plan
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness.launch import slowest_ms
from torchrec_bls import BLSConfig, BLSEmbeddingBagCollectionSharder, BLSEmbeddingCollectionSharder

TABLES = 26
ROWS = 20_000
DIM = 64
FEATURES = [f"feature_{i}" for i in range(TABLES)]

Forward = Callable[[], object]

_FORWARDS = 5  # of a sample

_MODULES: dict[str, Any] = {
    "EC": (EmbeddingConfig, EmbeddingCollection),
    "EBC": (EmbeddingBagConfig, EmbeddingBagCollection),
}
_SHARDERS: dict[str, Any] = {
    "EC": (EmbeddingCollectionSharder, BLSEmbeddingCollectionSharder),
    "EBC": (EmbeddingBagCollectionSharder, BLSEmbeddingBagCollectionSharder),
}


class Case(NamedTuple):
    """One combination."""

    module: str  # "EC" (EmbeddingCollection) or "EBC" (EmbeddingBagCollection)
    sharding: str  # "table_wise", "row_wise" or "column_wise"
    ranks: int
    batch: int  # samples of each rank


def ids_of(case: Case, rank: int, rows: int = ROWS) -> KeyedJaggedTensor:
    """One uniformly drawn id for each feature and sample."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(rows, (TABLES * case.batch,), generator=generator)
    return KeyedJaggedTensor(FEATURES, values, lengths=torch.ones_like(values, dtype=torch.int32))


def build(case: Case, ids: KeyedJaggedTensor) -> tuple[Forward, Forward, Forward]:
    """Returns the forwards of TorchRec's sharded module, of ours, and the lookup alone."""
    ours = sharded(case, _SHARDERS[case.module][1](BLSConfig()), dist.group.WORLD)
    context = ours.create_context()
    local_ids = ours.input_dist(context, ids).wait().wait()
    # An exchange of embeddings answers each exchange of ids.
    ours.compute_and_output_dist(context, local_ids).wait()

    def lookup() -> object:
        return [look_up(each) for look_up, each in zip(ours._lookups, local_ids, strict=True)]

    return build_torchrec(case, ids, dist.group.WORLD), lambda: ours(ids).wait(), lookup


def build_torchrec(case: Case, ids: KeyedJaggedTensor, group: dist.ProcessGroup) -> Forward:
    """Returns the forward of TorchRec's own sharded module over `group`."""
    module = sharded(case, _SHARDERS[case.module][0](), group)
    return lambda: module(ids).wait()


def samplers(forwards: Mapping[str, Forward]) -> dict[str, Callable[[], float]]:
    """By name, what samples the ms of a forward on the slowest rank, of a few back to back."""
    return {name: partial(slowest_ms, each, _FORWARDS) for name, each in forwards.items()}


def sharded(
    case: Case, sharder: Any, group: Any, rows: int = ROWS, dim: int = DIM, name: str = ""
) -> Any:
    """Returns the module of a case, sharded; ours of one group need to differ in case or name."""
    config, whole = _MODULES[case.module]
    torch.manual_seed(0)
    module = whole(
        tables=[
            config(name=f"table_{i}", num_embeddings=rows, embedding_dim=dim, feature_names=[each])
            for i, each in enumerate(FEATURES)
        ]
    )
    kernel, ranks = EmbeddingComputeKernel.FUSED.value, case.ranks
    placed: dict[str, Any] = {
        "table_wise": lambda i: {"rank": i % ranks},
        "row_wise": lambda _: {},
        "column_wise": lambda i: {"ranks": [i % ranks, (i + 1) % ranks]},
    }
    how, where = getattr(sharding_plan, case.sharding), placed[case.sharding]
    plan = sharding_plan.construct_module_sharding_plan(
        module,
        {f"table_{i}": how(compute_kernel=kernel, **where(i)) for i in range(TABLES)},
        sharder=sharder,
        local_size=ranks,
        world_size=ranks,
        device_type="cpu",
    )
    env = ShardingEnv.from_process_group(group)
    return sharder.shard(module, plan, env, torch.device("cpu"), f"{case} {name}")

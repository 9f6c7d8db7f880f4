"""The sharded modules that are compared, of 26 tables, and the ids that they look up."""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed import sharding_plan
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness.launch import slowest_ms
from torchrec_bls import BLSConfig, BLSEmbeddingBagCollectionSharder, BLSEmbeddingCollectionSharder

TABLES = 26
HOT_ROWS = 20_000  # of a table, looked up again and again
FEATURES = [f"feature_{i}" for i in range(TABLES)]

Forward = Callable[[], object]

_FORWARDS = 5  # of a sample

KINDS: dict[str, tuple[Any, ...]] = {
    "EC": (
        *(EmbeddingConfig, EmbeddingCollection),
        *(EmbeddingCollectionSharder, BLSEmbeddingCollectionSharder),
    ),
    "EBC": (
        *(EmbeddingBagConfig, EmbeddingBagCollection),
        *(EmbeddingBagCollectionSharder, BLSEmbeddingBagCollectionSharder),
    ),
}


class Case(NamedTuple):
    """One combination of a module with what it looks up."""

    module: str  # "EC" (EmbeddingCollection) or "EBC" (EmbeddingBagCollection)
    sharding: str  # "table_wise", "row_wise" or "column_wise"
    ranks: int
    batch: int  # samples of each rank
    ids: int = 1  # of a feature and sample; their mean, about, where they are drawn
    lengths: str = "fixed"  # or "zipf"
    dim: int = 64
    pooling: str = "sum"  # "mean" or "weighted"
    rows: int = HOT_ROWS  # of a table


def ids_of(case: Case, rank: int, seed: int = 0) -> KeyedJaggedTensor:
    """Uniformly drawn ids of each feature and sample, others for each seed."""
    possible = np.arange(1, 5 * case.ids + 1, dtype=np.int32)
    shares = 1 / possible if case.lengths == "zipf" else possible == case.ids
    draw = np.random.default_rng(rank)
    lengths = draw.choice(possible, TABLES * case.batch, p=shares / shares.sum())
    return _drawn(case, FEATURES, torch.from_numpy(lengths), case.rows, 1000 * seed + rank)


def _drawn(
    case: Case, keys: list[str], lengths: torch.Tensor, rows: int, seed: int
) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(rows, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(values)) if case.pooling == "weighted" else None
    return KeyedJaggedTensor(keys, values, weights, lengths=lengths)


class Modules:
    """What is compared: TorchRec's sharded module, the same over the backend bls, and ours."""

    def __init__(self, case: Case) -> None:
        self._ours = sharded(case, KINDS[case.module][3](config=BLSConfig()), dist.group.WORLD)
        self._bounded_lag = lambda ids: self._ours(ids).wait()
        self._torchrec = torchrec_forward(case, dist.group.WORLD)
        self._backend = torchrec_forward(case, dist.new_group(backend="bls"))

    def forwards(self, case: Case, rank: int) -> dict[str, Callable[[int], Forward]]:
        """What makes, of a seed, the forwards of each, and FBGEMM's lookup alone."""
        ours = self._ours
        context = ours.create_context()
        local_ids = ours.input_dist(context, ids_of(case, rank)).wait().wait()
        # An exchange of embeddings answers each exchange of ids.
        ours.compute_and_output_dist(context, local_ids).wait()
        # By rows, the last rank may have fewer than the others.
        share = case.ranks if case.sharding == "row_wise" else 1
        rows = case.rows - (share - 1) * -(-case.rows // share)

        def of_local_ids(call: Callable[[Any], object]) -> Callable[[int], Forward]:
            def ids(seed: int) -> list[KeyedJaggedTensor]:
                return [_drawn(case, each.keys(), each.lengths(), rows, seed) for each in local_ids]

            return lambda seed: partial(call, ids(seed))

        lookup = of_local_ids(lambda ids: [f(x) for f, x in zip(ours._lookups, ids, strict=True)])
        if case.ranks == 1:  # without anybody to exchange with
            return {"ours": lambda seed: self._sums(ids_of(case, rank, seed)), "lookup": lookup}
        return {
            "torchrec": lambda seed: partial(self._torchrec, ids_of(case, rank, seed)),
            "backend": lambda seed: partial(self._backend, ids_of(case, rank, seed)),
            "ours": lambda seed: partial(self._bounded_lag, ids_of(case, rank, seed)),
            "lookup": lookup,
        }

    def _sums(self, ids: KeyedJaggedTensor) -> Forward:
        """What follows a forward's exchange of ids, which is done here: sums, straight from the
        ids that came."""
        ours, context = self._ours, self._ours.create_context()
        arrived = ours.input_dist(context, ids).wait().wait()
        return lambda: ours.compute_and_output_dist(context, arrived).wait()


def torchrec_forward(case: Case, group: dist.ProcessGroup) -> Callable[[Any], object]:
    """The forward of TorchRec's own sharded module over `group`."""
    module = sharded(case, KINDS[case.module][2](), group)
    return lambda ids: module(ids).wait()


def samplers(
    forwards: Mapping[str, Callable[[int], Forward]], fresh: bool = False
) -> dict[str, Callable[[], float]]:
    """By name, what samples the ms of a forward on the slowest rank, of a few back to back.

    With `fresh` ids no two forwards look the same rows up.
    """
    seeds = itertools.count(1)

    def sample(prepared: Callable[[int], Forward]) -> float:
        calls = [prepared(next(seeds) if fresh else 0) for _ in range(_FORWARDS)]
        return slowest_ms(lambda: calls.pop()(), _FORWARDS)

    return {name: partial(sample, prepared) for name, prepared in forwards.items()}


def sharded(case: Case, sharder: Any, group: Any, name: str = "") -> Any:
    """Returns the module of a case, sharded; ours of one group need to differ in case or name."""
    module, plan = placed(case, sharder)
    env = ShardingEnv.from_process_group(group)
    return sharder.shard(module, plan, env, torch.device("cpu"), f"{case} {name}")


def placed(case: Case, sharder: Any) -> tuple[Any, Any]:
    """Returns the module of a case, and the plan that places its tables."""
    config, whole, *_ = KINDS[case.module]
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_embeddings": case.rows, "embedding_dim": case.dim}
    options = {}
    if case.module == "EBC":
        options["is_weighted"] = case.pooling == "weighted"
        sizes["pooling"] = PoolingType.MEAN if case.pooling == "mean" else PoolingType.SUM
    named = enumerate(FEATURES)
    tables = [config(name=f"table_{i}", feature_names=[each], **sizes) for i, each in named]
    module = whole(tables=tables, **options)
    kernel, ranks = EmbeddingComputeKernel.FUSED.value, case.ranks
    places: dict[str, Any] = {
        "table_wise": lambda i: {"rank": i % ranks},
        "row_wise": lambda _: {},
        "column_wise": lambda i: {"ranks": [i % ranks, (i + 1) % ranks]},
    }
    how, where = getattr(sharding_plan, case.sharding), places[case.sharding]
    plan = sharding_plan.construct_module_sharding_plan(
        module,
        {f"table_{i}": how(compute_kernel=kernel, **where(i)) for i in range(TABLES)},
        sharder=sharder,
        local_size=ranks,
        world_size=ranks,
        device_type="cpu",
    )
    return module, plan

"""Quantized modules over processes, beside TorchRec's unsharded ones on every rank."""

import copy
import itertools
from collections.abc import Callable
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
)
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import LazyAwaitable, ShardingEnv
from torchrec.inference.modules import quantize_inference_model
from tqdm import tqdm

from benchmarks.harness import record
from benchmarks.harness.launch import on_ranks, slowest_ms
from benchmarks.harness.statistics import in_turns, ratio_of_medians
from benchmarks.modules.page import quantized_section
from torchrec_bls import (
    BLSConfig,
    BLSQuantEmbeddingBagCollectionSharder,
    BLSQuantEmbeddingCollectionSharder,
)

TABLES, DIM, FRESH = 26, 64, 8
TYPES = {"int8": torch.qint8, "int4": torch.quint4x2, "int2": torch.quint2x4, "fp16": torch.half}
# Each module is warmed up with batches of its own; those timed are new to it, or "cold".
FULL = {"types": list(TYPES), "rows": 200_000, "turns": 15, "batches": [1, 8, 64, 512, 2048]}
QUICK = {"types": ["int4"], "rows": 20_000, "turns": 3, "batches": [512]}


def module_of(kind: str, rows: int) -> nn.Module:
    """Returns a float module of tables t0, t1, ... for features f0, f1, ..."""
    names = [(f"t{i}", [f"f{i}"]) for i in range(TABLES)]
    how = {"num_embeddings": rows, "embedding_dim": DIM}
    module: nn.Module = (
        EmbeddingCollection([EmbeddingConfig(name=n, feature_names=f, **how) for n, f in names])
        if kind == "EC"
        else EmbeddingBagCollection(
            [EmbeddingBagConfig(name=n, feature_names=f, **how) for n, f in names]
        )
    )
    return module


def quantized(module: nn.Module, name: str) -> nn.Module:
    """Returns TorchRec's quantized form of a module."""
    parent = nn.Module()
    parent.embeddings = module
    quantize_inference_model(parent, per_table_weight_dtype=None, quantization_dtype=TYPES[name])
    made: nn.Module = parent.embeddings
    return made


def sharded_of(kind: str, module: nn.Module, sharding: str, config: BLSConfig | None = None) -> Any:
    """Shards a quantized module over all ranks."""
    ranks = dist.get_world_size()
    sharder: Any = (
        BLSQuantEmbeddingCollectionSharder(config=config)
        if kind == "EC"
        else BLSQuantEmbeddingBagCollectionSharder(config=config)
    )
    how = {
        f"t{i}": table_wise(rank=i % ranks) if sharding == "table_wise" else row_wise()
        for i in range(TABLES)
    }
    plan = construct_module_sharding_plan(module, how, sharder, ranks, ranks, "cpu")
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return sharder.shard(module, plan, env)


def _arrived(output: Any) -> Any:
    """Waits for what a sharded module returns."""
    return output.wait() if isinstance(output, LazyAwaitable) else output


def _batches(batch: int, ids: int, rows: int) -> list[KeyedJaggedTensor]:
    keys, lengths = [f"f{i}" for i in range(TABLES)], torch.full((TABLES * batch,), ids)
    size = (TABLES * batch * ids,)
    return [
        KeyedJaggedTensor(keys, torch.randint(rows, size), lengths=lengths) for _ in range(FRESH)
    ]


def measure(rank: int, name: str, kind: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Times forwards of both shardings and of the unsharded module, the slowest rank each."""
    torch.manual_seed(0)
    rows = settings["rows"]
    models = {"unsharded": quantized(module_of(kind, rows), name)}
    for sharding in ("table_wise", "row_wise"):
        models[sharding] = sharded_of(kind, copy.deepcopy(models["unsharded"]), sharding)
    torch.manual_seed(rank)
    results: list[dict[str, Any]] = []
    for batch, ids in itertools.product(settings["batches"], (1, 20) if kind == "EBC" else (1,)):
        drawn = itertools.cycle(_batches(batch, ids, rows))

        def timed(model: nn.Module, drawn: Any = drawn) -> Callable[[], float]:
            def once() -> object:
                return _arrived(model(next(drawn)))

            return lambda: slowest_ms(once, FRESH)

        with torch.no_grad():
            ms = in_turns({each: timed(model) for each, model in models.items()}, settings["turns"])
        plain = ms["unsharded"].values_in_order
        ratios = {
            sharding: ratio_of_medians(ms[sharding].values_in_order, plain)
            for sharding in ("table_wise", "row_wise")
        }
        case = {"type": name, "module": kind, "batch": batch, "ids": ids}
        results.append({**case, "ms": ms, "over_unsharded": ratios})
    return results


def main() -> None:
    arguments = record.parser(__doc__, quick="INT4, small tables, 3 turns").parse_args()
    settings: dict[str, Any] = QUICK if arguments.quick else FULL
    before = record.environment()
    results: list[dict[str, Any]] = []
    for name, kind in tqdm(list(itertools.product(settings["types"], ("EC", "EBC")))):
        results += on_ranks(2, measure, name, kind, settings)
    record.publish(
        arguments.json, "quantized_modules", before, settings, results, quantized_section
    )


if __name__ == "__main__":
    main()

"""Small quantized modules, their plans and their sharding, the same on every rank."""

from collections.abc import Sequence
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
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.inference.modules import quantize_inference_model

from tests.distributed.models import SparseOnly
from torchrec_bls import (
    BLSConfig,
    BLSQuantEmbeddingBagCollectionSharder,
    BLSQuantEmbeddingCollectionSharder,
)

CPU = torch.device("cpu")
TYPES = {
    "int8": torch.qint8,
    "int4": torch.quint4x2,
    "int2": torch.quint2x4,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
KINDS = ("ec", "ebc", "weighted")
# Rows of three tables lie in several pages, those of one in less than one.
ROWS = [700, 3, 1021, 512]
FEATURES = [f"f{table}" for table in range(len(ROWS))]
DIMS = [16, 8, 24, 64]


def float_module(kind: str, device: str = "cpu", rows: Sequence[int] = ROWS) -> nn.Module:
    """Returns an "ec", "ebc" (sum and mean pooling) or "weighted" EBC; f0 is in two tables."""
    torch.manual_seed(1)
    features = [[name, *(["f0"] if table == 2 else [])] for table, name in enumerate(FEATURES)]
    if kind == "ec":
        collection: nn.Module = EmbeddingCollection(
            device=torch.device(device),
            tables=[
                EmbeddingConfig(
                    num_embeddings=rows[table],
                    embedding_dim=16,
                    name=f"t{table}",
                    feature_names=features[table],
                )
                for table in range(len(rows))
            ],
        )
        return collection
    bags: nn.Module = EmbeddingBagCollection(
        device=torch.device(device),
        tables=[
            EmbeddingBagConfig(
                num_embeddings=rows[table],
                embedding_dim=DIMS[table],
                name=f"t{table}",
                feature_names=features[table],
                pooling=PoolingType.MEAN if table % 2 and kind == "ebc" else PoolingType.SUM,
            )
            for table in range(len(rows))
        ],
        is_weighted=kind == "weighted",
    )
    return bags


def quantized(model: nn.Module, types: Sequence[str], output: torch.dtype = torch.float) -> Any:
    """Returns TorchRec's quantized form of a model, table i of `types[i]`."""
    return quantize_inference_model(
        model,
        per_table_weight_dtype={f"t{i}": TYPES[each] for i, each in enumerate(types)},
        output_dtype=output,
    )


def model_of(kind: str, types: Sequence[str], output: torch.dtype = torch.float) -> Any:
    """Returns a quantized model with one embedding module."""
    return quantized(SparseOnly(float_module(kind)), types, output)


GENERATORS: dict[str, Any] = {
    "table_wise": lambda table: table_wise(rank=(table + 1) % dist.get_world_size()),
    "row_wise": lambda table: row_wise(),
    "mixed": lambda table: row_wise() if table % 2 == 0 else table_wise(rank=0),
    "column_wise": lambda table: column_wise(ranks=[0, 1]),
}


def plan_of(module: nn.Module, sharder: Any, sharding: str, device: torch.device = CPU) -> Any:
    """Returns a module's plan; `sharding` is a key of GENERATORS."""
    plan = construct_module_sharding_plan(
        module,
        {f"t{table}": GENERATORS[sharding](table) for table in range(len(ROWS))},
        sharder=sharder,
        world_size=dist.get_world_size(),
        local_size=dist.get_world_size(),
        device_type=device.type,
    )
    if device != CPU:
        for parameter in plan.values():
            parameter.compute_kernel = "quant_uvm"
    return plan


def sharder_of(kind: str, config: BLSConfig | None = None, **how: Any) -> Any:
    """Returns the sharder of a kind of module."""
    if kind == "ec":
        return BLSQuantEmbeddingCollectionSharder(config=config, **how)
    return BLSQuantEmbeddingBagCollectionSharder(config=config, **how)


def shard(
    model: Any, sharder: Any, sharding: str, device: torch.device = CPU
) -> DistributedModelParallel:
    """Shards `model`, whose own weights are freed."""
    plan = plan_of(model.embeddings, sharder, sharding, device)
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({"embeddings": plan}),
        sharders=[sharder],
    )


def make_ids(
    kind: str,
    seed: int,
    samples: int,
    *,
    most_ids: int = 4,
    dtype: torch.dtype = torch.int64,
    keys: Sequence[str] = FEATURES,
) -> KeyedJaggedTensor:
    """Draws 0 to `most_ids` ids per sample and feature."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [
        torch.randint(most_ids + 1, (samples,), generator=generator, dtype=torch.int32)
        for _ in keys
    ]
    ids = torch.cat(
        [
            torch.randint(
                ROWS[FEATURES.index(key)], (int(each.sum()),), generator=generator, dtype=dtype
            )
            for key, each in zip(keys, lengths, strict=True)
        ]
    )
    weights = torch.rand(len(ids), generator=generator) if kind == "weighted" else None
    return KeyedJaggedTensor(list(keys), ids, weights, torch.cat(lengths))

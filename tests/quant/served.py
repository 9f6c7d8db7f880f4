"""A model with quantized and float tables and a dense layer, and its weights in each version."""

from functools import cache
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
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.inference.modules import quantize_inference_model

from tests.direct import served
from tests.distributed.models import arrived, flatten
from tests.quant.models import CPU, TYPES
from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BLSQuantEmbeddingBagCollectionSharder,
    BLSQuantEmbeddingCollectionSharder,
)

# Rows of three tables lie in several pages, those of one in less than one.
ROWS = [700, 3, 1021, 512]
FEATURES = [f"f{table}" for table in range(len(ROWS))]
DATA_TYPES = ["int8", "int4", "int2", "fp16"]

check = served.check
number_of = served.number_of


class Model(nn.Module):
    """Looks a batch up in quantized bags and rows and in float bags, and runs a dense layer.

    Args:
        device: device of the embedding modules.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        on = torch.device(device)
        self.bags: Any = EmbeddingBagCollection(
            device=on,
            tables=[
                EmbeddingBagConfig(
                    num_embeddings=rows,
                    embedding_dim=8 * (table + 1),
                    name=f"b{table}",
                    feature_names=[f"f{table}"],
                    pooling=PoolingType.MEAN if table % 2 else PoolingType.SUM,
                )
                for table, rows in enumerate(ROWS)
            ],
        )
        self.rows: Any = EmbeddingCollection(
            device=on,
            tables=[
                EmbeddingConfig(
                    num_embeddings=rows,
                    embedding_dim=16,
                    name=f"r{table}",
                    feature_names=[f"f{table}"],
                )
                for table, rows in enumerate(ROWS)
            ],
        )
        self.plain: Any = EmbeddingBagCollection(
            device=on,
            tables=[
                EmbeddingBagConfig(
                    num_embeddings=ROWS[0], embedding_dim=8, name="p0", feature_names=["f0"]
                )
            ],
        )
        self.dense = nn.Linear(1, 3)

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        bags, rows = arrived(self.bags(ids)).to_dict(), flatten(self.rows(ids))
        plain = arrived(self.plain(ids)).values().clone()
        return (
            {f"bags {name}": bags[name].clone() for name in sorted(bags)}
            | {f"rows {name}": rows[name] for name in sorted(rows)}
            | {"plain": plain, "dense": self.dense(torch.ones(1, 1)).detach().clone()}
        )


def weights_of(number: int) -> dict[str, torch.Tensor]:
    """Returns all weights of a version before they are quantized: whole numbers."""
    generator = torch.Generator().manual_seed(1000 + number)
    return {
        name: torch.randint(-1000, 1000, tensor.shape, generator=generator).float()
        for name, tensor in Model().state_dict().items()
    }


def quantized(model: Model, first_types: int = 0) -> Model:
    """Returns a model whose bags and rows are quantized by TorchRec, each table by a type of its
    own, beginning with `DATA_TYPES[first_types]`."""
    types = DATA_TYPES[first_types:] + DATA_TYPES[:first_types]
    pair = nn.ModuleDict({"bags": model.bags, "rows": model.rows})
    made: Any = quantize_inference_model(
        pair,
        per_table_weight_dtype={
            f"{kind}{table}": TYPES[name] for kind in "br" for table, name in enumerate(types)
        },
    )
    model.bags, model.rows = made["bags"], made["rows"]
    return model


def unsharded(number: int) -> Model:
    """Returns TorchRec's own model with the weights of a version."""
    model = Model()
    model.load_state_dict(weights_of(number))
    return quantized(model)


def bare_model() -> Model:
    """Returns the model with no memory for tables and other dense weights."""
    return quantized(Model("meta"))


class Expected(served.Expected):
    """What the model gives for a batch in each version, by FBGEMM's lookups in one process."""

    def _model(self, number: int) -> nn.Module:
        return unsharded(number)


def batches_of(rank: int, count: int = 4) -> list[KeyedJaggedTensor]:
    return [make_ids(100 * rank + number) for number in range(count)]


def make_ids(seed: int, samples: int = 5) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, (len(ROWS), samples), generator=generator, dtype=torch.int32)
    ids = [
        torch.randint(rows, (int(of_feature.sum()),), generator=generator)
        for rows, of_feature in zip(ROWS, lengths, strict=True)
    ]
    return KeyedJaggedTensor(FEATURES, torch.cat(ids), lengths=lengths.view(-1))


def sharded(
    config: BLSConfig | None = None, device: torch.device = CPU
) -> DistributedModelParallel:
    """Returns the model with the weights of version 1, which looks up on a device."""
    config = config or BLSConfig(lookup="direct", deadline=30.0)
    model = unsharded(1)
    sharders: dict[str, Any] = {
        "bags": BLSQuantEmbeddingBagCollectionSharder(config=config),
        "rows": BLSQuantEmbeddingCollectionSharder(config=config),
        "plain": BLSEmbeddingBagCollectionSharder({"learning_rate": 0.1}, config=config),
    }
    world_size = dist.get_world_size()
    plans = {}
    for name, sharder in sharders.items():
        module = getattr(model, name)
        tables = list(getattr(module, "embedding_bags", None) or module.embeddings)
        plans[name] = construct_module_sharding_plan(
            module,
            {
                table: row_wise() if int(table[1:]) % 2 == 0 else table_wise(rank=world_size - 1)
                for table in tables
            },
            sharder=sharder,
            world_size=world_size,
            local_size=world_size,
            device_type=device.type,
        )
    stored, plain = ("dense", "fused") if device == CPU else ("quant_uvm", "fused_uvm")
    for name, plan in plans.items():
        for parameter in plan.values():
            parameter.compute_kernel = plain if name == "plain" else stored
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan(plans),
        sharders=list(sharders.values()),
        init_data_parallel=device == CPU,  # replicas of dense layers would move to the GPU
    )


def check_live(model: Any, number: int) -> None:
    """The state dict shows the rows of a version."""
    theirs = unsharded_once(number).state_dict()
    for name, tensor in model.state_dict().items():
        if name.startswith(("bags.", "rows.")):
            shown = [getattr(each, "elem", each) for each in (tensor, theirs[name])]
            assert torch.equal(*shown), name


def write_in_place(model: Any, number: int) -> None:
    """Writes the weights of a version over those that this rank's model shows."""
    theirs = unsharded_once(number)
    plain = weights_of(number)["plain.embedding_bags.p0.weight"]
    with torch.no_grad():
        for name in ("bags", "rows", "dense"):
            getattr(model.module, name).load_state_dict(getattr(theirs, name).state_dict())
        for shard in model.module.plain.state_dict()["embedding_bags.p0.weight"].local_shards():
            first, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            shard.tensor.copy_(plain[first : first + rows])


unsharded_once = cache(unsharded)

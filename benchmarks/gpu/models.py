"""The tables of a run on a GPU, and who looks them up, in a process that is the only rank."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.inference.modules import quantize_inference_model

from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BLSQuantEmbeddingBagCollectionSharder,
)

TABLES = 26
FEATURES = [f"f{table}" for table in range(TABLES)]
#: What outputs are on. The first GPU, whatever the process has else.
GPU = torch.device("cuda", 0)
HOST = torch.device("cpu")
_DEADLINE_S = 120.0
# Of Zipf's law for ids.
_EXPONENT = 1.05

#: Returns the pooled rows of a batch that is on the host, [samples, columns], on the GPU.
LookUp = Callable[[KeyedJaggedTensor], torch.Tensor]


class Tables(NamedTuple):
    """Tables that are all alike.

    Attributes:
        rows: rows of each.
        dim: columns of each.
        stored: "float", or "int8" for rows of 8 bits with a scale and a shift.
    """

    rows: int
    dim: int
    stored: str = "float"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, as it is stored."""
        return 4 * self.dim if self.stored == "float" else self.dim + 4

    def module(self) -> Any:
        """Makes them, with random weights, as a model of nothing else."""
        torch.manual_seed(0)
        bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=f"t{table}",
                    num_embeddings=self.rows,
                    embedding_dim=self.dim,
                    feature_names=[feature],
                )
                for table, feature in enumerate(FEATURES)
            ]
        )
        model = _Alone(bags)
        if self.stored == "float":
            return model
        types = {f"t{table}": torch.qint8 for table in range(TABLES)}
        return quantize_inference_model(
            model, per_table_weight_dtype=types, output_dtype=torch.float
        )


class _Alone(nn.Module):
    """A model of one module."""

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.bags(features)


@contextmanager
def group() -> Iterator[None]:
    """A context in which this process is the only rank."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def sharded(model: Any, lookup: str, device: torch.device) -> DistributedModelParallel:
    """Shards a model of `Tables`, with outputs on a device."""
    name = f"{lookup}, {device.type}"  # ranks tell models of one process apart by it
    config = BLSConfig(lookup=lookup, name=name, deadline=_DEADLINE_S)
    is_float = isinstance(model.bags, EmbeddingBagCollection)
    sharder: Any = (
        BLSEmbeddingBagCollectionSharder(config=config)
        if is_float
        else BLSQuantEmbeddingBagCollectionSharder(config=config)
    )
    plan = construct_module_sharding_plan(
        model.bags,
        {f"t{table}": table_wise(rank=0) for table in range(TABLES)},
        sharder=sharder,
        world_size=1,
        local_size=1,
        device_type=device.type,
    )
    kernels = ("fused", "fused_uvm") if is_float else ("quant", "quant_uvm")
    for planned in plan.values():
        planned.compute_kernel = kernels[device.type == "cuda"]
    return DistributedModelParallel(
        model,
        device=device,
        plan=ShardingPlan({"bags": plan}),
        sharders=[sharder],
        init_data_parallel=False,
    )


def values_of(model: Any, features: KeyedJaggedTensor) -> torch.Tensor:
    """The output of a model, [samples, columns], in the order of the tables."""
    pooled = model(features)
    pooled = pooled.wait() if hasattr(pooled, "wait") else pooled
    if list(pooled.keys()) == FEATURES:  # as FBGEMM's are, which need no copy
        values: torch.Tensor = pooled.values()
        return values
    return torch.cat([pooled[feature] for feature in FEATURES], dim=1)


def pinned_copy_of(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy by pinned memory. From pageable memory a copy is slower, and the host waits."""
    if device.type == "cpu":
        return values.clone()
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values).to(device, non_blocking=True)


def fbgemm(tables: Tables, location: str, weights: Any, device: torch.device) -> LookUp:
    """FBGEMM's own lookups on a GPU, of tables in HBM or in managed memory of the host.

    Args:
        tables: the tables, of floats.
        location: "DEVICE", "MANAGED" or "MANAGED_CACHING".
        weights: module with the weights.
        device: the GPU.

    Raises:
        RuntimeError: this build of FBGEMM has no kernels for it.
    """
    import fbgemm_gpu
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    if getattr(fbgemm_gpu, "__variant__", "cpu") != "cuda":
        raise RuntimeError("FBGEMM is its build for CPUs")
    where = EmbeddingLocation[location]
    specs = [(tables.rows, tables.dim, where, ComputeDevice.CUDA)] * TABLES
    made = SplitTableBatchedEmbeddingBagsCodegen(specs, pooling_mode=PoolingMode.SUM, device=device)
    for ours, theirs in zip(
        made.split_embedding_weights(), weights.embedding_bags.values(), strict=True
    ):
        ours.copy_(theirs.weight)
    return partial(_by_fbgemm, made, device)


def _by_fbgemm(made: Any, device: torch.device, features: KeyedJaggedTensor) -> torch.Tensor:
    ids = features.values().pin_memory().to(device, non_blocking=True)
    offsets = features.offsets().long().pin_memory().to(device, non_blocking=True)
    out: torch.Tensor = made(ids, offsets)
    return out


def drawn(tables: Tables, batch: int, ids: int, law: str, seed: int) -> KeyedJaggedTensor:
    """A batch with so many ids a feature, "uniform" or by "zipf"."""
    count = TABLES * batch * ids
    generator = np.random.default_rng(seed)
    if law == "uniform":
        values = generator.integers(tables.rows, size=count)
    else:
        # By the inverse of the law's integral. Frequent ids are spread over each table.
        last = tables.rows ** (1 - _EXPONENT)
        ranks = (1 + generator.random(count) * (last - 1)) ** (1 / (1 - _EXPONENT))
        values = ranks.astype(np.int64) * 2_654_435_761 % tables.rows
    lengths = torch.full((TABLES * batch,), ids, dtype=torch.int32)
    return KeyedJaggedTensor(FEATURES, torch.from_numpy(values), lengths=lengths)

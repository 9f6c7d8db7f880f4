"""A DLRM with 26 tables in Criteo's shape, sharded table-wise and row-wise."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_bls.datasets import CATEGORICAL_NAMES, DENSE_FEATURES

BOTTOM_LAYERS = [128]
TOP_LAYERS = [128, 64, 1]
TABLES_PATH = "dlrm.sparse_arch.embedding_bag_collection"


class DlrmOnBatches(nn.Module):
    """A DLRM that takes a ``Batch``, as TorchRec's pipelines call their models."""

    def __init__(
        self, rows_per_table: list[int], embedding_dim: int, tables_on: str = "cpu"
    ) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"table_{name}",
                embedding_dim=embedding_dim,
                num_embeddings=rows,
                feature_names=[name],
            )
            for name, rows in zip(CATEGORICAL_NAMES, rows_per_table, strict=True)
        ]
        self.dlrm = DLRM(
            EmbeddingBagCollection(tables=tables, device=torch.device(tables_on)),
            dense_in_features=DENSE_FEATURES,
            dense_arch_layer_sizes=[*BOTTOM_LAYERS, embedding_dim],
            over_arch_layer_sizes=TOP_LAYERS,
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """Returns the logits, (rows, 1)."""
        return cast(torch.Tensor, self.dlrm(batch.dense_features, batch.sparse_features))


def build_model(rows_per_table: list[int], embedding_dim: int, seed: int) -> DlrmOnBatches:
    """Builds the whole model; the same seed gives the same weights on every rank."""
    torch.manual_seed(seed)
    return DlrmOnBatches(rows_per_table, embedding_dim).eval()


def sharding_plan(model: DlrmOnBatches, sharder: Any, ranks: int) -> ShardingPlan:
    """Cuts the largest tables by rows over all ranks and deals out the others whole."""
    tables = model.dlrm.sparse_arch.embedding_bag_collection
    configs = tables.embedding_bag_configs()
    largest = max(config.num_embeddings for config in configs)
    whole = [config.name for config in configs if config.num_embeddings < largest]
    kernel = EmbeddingComputeKernel.FUSED.value
    generators = {
        config.name: (
            table_wise(rank=whole.index(config.name) % ranks, compute_kernel=kernel)
            if config.name in whole
            else row_wise(compute_kernel=kernel)
        )
        for config in configs
    }
    plan = construct_module_sharding_plan(
        tables,
        generators,
        sharder=sharder,
        local_size=ranks,
        world_size=ranks,
        device_type="cpu",
    )
    return ShardingPlan(plan={TABLES_PATH: plan})


def shard_model(model: DlrmOnBatches, sharder: Any, ranks: int) -> DistributedModelParallel:
    """Shards the model for inference, with the weights it has."""
    weights = model.state_dict()
    sharded = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=sharding_plan(model, sharder, ranks),
        sharders=[sharder],
        init_data_parallel=False,
    )
    sharded.load_state_dict(weights)  # on CPU TorchRec's own sharders leave pooled shards random
    return sharded.eval()

"""A small DLRM that is called with TorchRec's Batch, and its data."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ModuleSharder
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tests.distributed import models

DENSE_FEATURES = 3
EMBEDDINGS_IN_DLRM = "sparse_arch.embedding_bag_collection"


class BatchedDLRM(nn.Module):
    """A DLRM that takes its two inputs from a batch and gives logits."""

    def __init__(self, dlrm: DLRM) -> None:
        super().__init__()
        self.model = dlrm

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.model(batch.dense_features, batch.sparse_features)


def make_dlrm(
    sharder: ModuleSharder[Any],
    wrapper: type[nn.Module] = BatchedDLRM,
    types: Sequence[str] = ("table_wise", "row_wise", "column_wise", "table_wise", "row_wise"),
) -> DistributedModelParallel:
    """Returns `make_whole_dlrm`, sharded by `types`, the same weights on every rank."""
    whole = make_whole_dlrm(wrapper)
    embeddings = whole.get_submodule(f"model.{EMBEDDINGS_IN_DLRM}")
    plan = models.make_plan(embeddings, types, sharder)
    return models.shard_model(whole, {f"model.{EMBEDDINGS_IN_DLRM}": plan}, [sharder])


def make_whole_dlrm(wrapper: type[nn.Module] = BatchedDLRM) -> nn.Module:
    """Returns a DLRM of five tables, the same weights on every rank."""
    torch.manual_seed(1)
    embeddings = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{i}",
                embedding_dim=8,
                num_embeddings=models.ROWS[i],
                feature_names=[models.FEATURES[i]],
            )
            for i in range(len(models.FEATURES))
        ]
    )
    return wrapper(DLRM(embeddings, DENSE_FEATURES, [16, 8], [16, 1]))


def make_batch(rank: int, step: int) -> Batch:
    """Draws a batch of 2 to 5 samples."""
    samples = 2 + (rank + step) % 4
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return Batch(
        dense_features=torch.rand(samples, DENSE_FEATURES, generator=generator),
        sparse_features=models.make_ids(models.EBC, 1000 * rank + step, samples),
        labels=torch.randint(2, (samples,), generator=generator),
    )

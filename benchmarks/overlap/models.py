"""Dense parts of recommenders, and a transformer: embeddings come in as an input with gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.mlp import MLP

TABLES, DENSE = 26, 13


class DLRM(nn.Module):
    """Bottom MLP, pairwise products, top MLP."""

    def __init__(self, bottom: list[int], top: list[int]) -> None:
        super().__init__()
        self.dense, self.interaction = DenseArch(DENSE, bottom), InteractionArch(TABLES)
        self.over = OverArch(bottom[-1] + (TABLES + 1) * TABLES // 2, top)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        return self.over(self.interaction(self.dense(dense), sparse))


class DLRMv2(nn.Module):
    """MLPerf's: a low-rank cross network in place of products."""

    def __init__(self) -> None:
        super().__init__()
        width = (TABLES + 1) * 128
        self.dense, self.cross = DenseArch(DENSE, [512, 256, 128]), LowRankCrossNet(width, 3, 512)
        self.over = OverArch(width, [1024, 1024, 512, 256, 1])

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        together = torch.cat([self.dense(dense), sparse.flatten(1)], dim=1)
        return self.over(self.cross(together))


class WideAndDeep(nn.Module):
    """A linear layer beside an MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        inputs = DENSE + TABLES * dim
        self.wide, self.deep = nn.Linear(inputs, 1), MLP(inputs, [1024, 512, 256])
        self.last = nn.Linear(256, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        together = torch.cat([dense, sparse.flatten(1)], dim=1)
        return self.wide(together) + self.last(self.deep(together))


class DeepFM(nn.Module):
    """Factorization machine and MLP over the same embeddings."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dense, self.deep = nn.Linear(DENSE, dim), MLP((TABLES + 1) * dim, [400, 400, 400])
        self.last = nn.Linear(400, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        fields = torch.cat([self.dense(dense).unsqueeze(1), sparse], dim=1)
        products = (fields.sum(1).square() - fields.square().sum(1)).sum(1, keepdim=True)
        return self.last(self.deep(fields.flatten(1))) + 0.5 * products


class Transformer(nn.Module):
    """Four layers over sequences of 16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        return self.encoder(sparse[:, :16]) * dense.mean()


#: By name: what makes the model, columns of its embeddings, and samples of a batch.
MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "Kaggle DLRM": (lambda: DLRM([512, 256, 64, 16], [512, 256, 1]), 16, 512),
    "wider DLRM": (lambda: DLRM([1024, 512, 64], [2048, 1024, 1]), 64, 256),
    "DLRM-v2": (DLRMv2, 128, 64),
    "Wide&Deep": (lambda: WideAndDeep(16), 16, 512),
    "DeepFM": (lambda: DeepFM(16), 16, 512),
    "transformer": (lambda: Transformer(256), 256, 16),
}


def model_and_batch(name: str, rank: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The same weights on all ranks, and a batch of this one."""
    make, dim, samples = MODELS[name]
    torch.manual_seed(0)
    model = make()
    draw: Any = torch.Generator().manual_seed(rank)
    sparse = torch.randn(samples, TABLES, dim, generator=draw)
    return model, (torch.rand(samples, DENSE, generator=draw), sparse.requires_grad_())

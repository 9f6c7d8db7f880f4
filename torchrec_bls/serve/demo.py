"""A model to try the service with. Nothing has trained it, and it needs no file."""

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

FEATURES = {"user": 10_000, "item": 50_000, "category": 100}
DENSE_FEATURES = 4
_COLUMNS = 16


class Ranker(nn.Module):
    """Ranks items for users: a score between 0 and 1 for each sample.

    Args:
        device: device of the tables.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            device=torch.device(device),
            tables=[
                EmbeddingBagConfig(
                    name=f"{name}_table",
                    feature_names=[name],
                    num_embeddings=rows,
                    embedding_dim=_COLUMNS,
                )
                for name, rows in FEATURES.items()
            ],
        )
        self.layers = nn.Sequential(
            nn.Linear(DENSE_FEATURES + _COLUMNS * len(FEATURES), 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
        """Returns scores, [samples].

        Args:
            dense: dense features, float32 [samples, 4].
            ids: ids of each feature.
        """
        pooled = self.tables(ids)
        columns = torch.cat([dense, *(pooled[name] for name in FEATURES)], dim=1)
        return torch.sigmoid(self.layers(columns)).squeeze(1)


def build() -> nn.Module:
    """Returns the model without weights of its tables."""
    return Ranker("meta")


def write_checkpoint(path: str) -> None:
    """Writes weights that are random, always the same.

    Args:
        path: path of the file.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.save(Ranker("cpu").state_dict(), path)

"""Models whose answers to a sample depend on all of it, and on nothing else."""

from typing import Any

import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.inference.modules import quantize_inference_model

from tests.quant.models import TYPES
from tests.serve.samples import DENSE_COLUMNS, FEATURES, KEYS, MOST_IDS

_COLUMNS = 8


class Bags(nn.Module):
    """Returns pooled embeddings. A feature is looked up in two tables.

    Args:
        device: device of the tables.
        is_weighted: whether ids have weights.
        mean: whether a table is pooled to means.
    """

    def __init__(self, device: str = "cpu", is_weighted: bool = False, mean: bool = False) -> None:
        super().__init__()
        self.tables: Any = EmbeddingBagCollection(
            device=torch.device(device),
            is_weighted=is_weighted,
            tables=[
                EmbeddingBagConfig(
                    num_embeddings=feature.rows,
                    embedding_dim=_COLUMNS,
                    name=f"t{number}",
                    feature_names=[feature.name],
                    pooling=PoolingType.MEAN if mean and number == 0 else PoolingType.SUM,
                )
                for number, feature in enumerate((*FEATURES, FEATURES[0]))
            ],
        )

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        return {"dense": 2 * dense, "bags": self.tables(ids).values()}


class Scores(Bags):
    """Returns a score from dense features beside pooled embeddings."""

    def __init__(self, device: str = "cpu", is_weighted: bool = False) -> None:
        super().__init__(device, is_weighted)
        self.layer = nn.Linear(DENSE_COLUMNS + _COLUMNS * (len(FEATURES) + 1), 1)

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:  # type: ignore[override]
        return self.layer(torch.cat([dense, self.tables(ids).values()], dim=1))[:, 0]  # type: ignore[no-any-return]


class Mixed(Bags):
    """Returns embeddings of tables that take weights, and of tables that do not.

    Args:
        device: device of the tables.
        is_weighted: whether the first ones take weights.
    """

    def __init__(self, device: str = "cpu", is_weighted: bool = True) -> None:
        super().__init__(device, is_weighted)
        self.others = Bags(device)
        self.rows = Rows(device)

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        others = self.others(dense, ids)["bags"]
        return super().forward(dense, ids) | {"others": others, "rows": self.rows(dense, ids)}


class Rows(nn.Module):
    """Returns the embedding of each id, in one row for each sample.

    Args:
        device: device of the tables.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.tables: Any = EmbeddingCollection(
            device=torch.device(device),
            tables=[
                EmbeddingConfig(
                    num_embeddings=feature.rows,
                    embedding_dim=_COLUMNS,
                    name=f"t{number}",
                    feature_names=[feature.name],
                )
                for number, feature in enumerate(FEATURES)
            ],
        )

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
        found: dict[str, JaggedTensor] = self.tables(ids)
        return torch.cat([dense, *(_in_rows(found[key]) for key in KEYS)], dim=1)


def _in_rows(embeddings: JaggedTensor) -> torch.Tensor:
    return torch.stack(
        [
            nn.functional.pad(each, (0, 0, 0, MOST_IDS - len(each))).reshape(-1)
            for each in embeddings.to_dense()
        ]
    )


def with_weights(model: nn.Module) -> nn.Module:
    """Gives a model whole numbers, always the same, of which sums are exact in any order."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-100, 100, parameter.shape, generator=generator))
    return model


def quantized(model: Any) -> nn.Module:
    """Quantizes the tables of a model to INT8."""
    names = [each.name for each in _configs(model.tables)]
    made: Any = quantize_inference_model(
        nn.ModuleDict({"tables": model.tables}),
        per_table_weight_dtype=dict.fromkeys(names, TYPES["int8"]),
    )
    model.tables = made["tables"]
    return model  # type: ignore[no-any-return]


def _configs(tables: Any) -> list[Any]:
    is_pooled = hasattr(tables, "embedding_bag_configs")
    return tables.embedding_bag_configs() if is_pooled else tables.embedding_configs()  # type: ignore[no-any-return]

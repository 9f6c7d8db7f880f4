"""A model with two embedding modules and a dense layer, and its weights in each version."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, PoolingType
from torchrec.distributed import DistributedModelParallel

from tests.distributed import models
from torchrec_bls import BLSConfig, version_of
from torchrec_bls.direct.arguments import FIRST_VERSION

KINDS = {"bags": models.EBC, "rows": models.EC}
SHARDINGS = {
    "bags": ["row_wise", "table_wise", "column_wise", "table_wise", "row_wise"],
    "rows": ["table_wise", "row_wise", "column_wise", "row_wise", "table_wise"],
}


class Model(nn.Module):
    """Looks a batch up in both modules and runs a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        # Means have other bits where they are not sharded.
        tables = [
            replace(table, pooling=PoolingType.SUM)
            for table in models.EBC.module().embedding_bag_configs()
        ]
        self.bags = EmbeddingBagCollection(tables=tables)
        self.rows = models.EC.module()
        self.dense = nn.Linear(1, 3)

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        return flatten({"bags": self.bags(ids), "rows": self.rows(ids)}) | {
            "dense": self.dense(torch.ones(1, 1)).detach().clone()
        }


def flatten(outputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns what both modules give, by names whose order does not depend on the plan."""
    bags = models.arrived(outputs["bags"]).to_dict()
    rows = models.flatten(outputs["rows"])
    return {f"bags {name}": bags[name].clone() for name in sorted(bags)} | {
        f"rows {name}": rows[name] for name in sorted(rows)
    }


def number_of(version: str) -> int:
    """Returns the number that a version has in these tests: 1 for what was sharded, or its name."""
    return 1 if version == FIRST_VERSION else int(version)


def weights_of(number: int) -> dict[str, torch.Tensor]:
    """Returns all weights of a version: whole numbers, whose sums have no rounding."""
    generator = torch.Generator().manual_seed(1000 + number)
    return {
        name: torch.randint(-1000, 1000, tensor.shape, generator=generator).float()
        for name, tensor in Model().state_dict().items()
    }


class Expected:
    """What the model gives for a batch in each version, by unsharded TorchRec modules."""

    def __init__(self, batches: Sequence[KeyedJaggedTensor]) -> None:
        self._batches = batches
        self._known: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def of(self, number: int, batch: int) -> dict[str, torch.Tensor]:
        if (number, batch) not in self._known:
            model = self._model(number)
            with torch.no_grad():
                for i, ids in enumerate(self._batches):
                    self._known[number, i] = model(ids)
        return self._known[number, batch]

    def _model(self, number: int) -> nn.Module:
        model = Model()
        model.load_state_dict(weights_of(number))
        return model


def bare_model() -> nn.Module:
    """Returns the model with no memory for tables and other dense weights."""
    with torch.device("meta"):
        model = Model()
    model.dense = nn.Linear(1, 3)
    return model


def batches_of(rank: int, count: int = 4) -> list[KeyedJaggedTensor]:
    return [models.make_ids(models.EBC, seed=100 * rank + i, samples=5) for i in range(count)]


def sharded(
    config: BLSConfig | None = None,
    device: torch.device = models.CPU,
    make: Callable[[], Model] = Model,
) -> DistributedModelParallel:
    """Returns the model with the weights of version 1, which looks up on a device."""
    model = make()
    model.load_state_dict(weights_of(1))
    sharders = [
        kind.bls_sharder(config or BLSConfig(lookup="direct", deadline=30.0))
        for kind in KINDS.values()
    ]
    plans = {
        name: models.make_plan(getattr(model, name), SHARDINGS[name], sharder, device=device)
        for (name, _), sharder in zip(KINDS.items(), sharders, strict=True)
    }
    return models.shard_model(model, plans, sharders, device)


def write_in_place(model: Any, number: int) -> None:
    """Writes the weights of a version over those that this rank's model shows."""
    new = weights_of(number)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not hasattr(tensor, "local_shards"):
                continue
            for shard in tensor.local_shards():
                (row, column), (rows, columns) = (
                    shard.metadata.shard_offsets,
                    shard.metadata.shard_sizes,
                )
                shard.tensor.copy_(new[name][row : row + rows, column : column + columns])
        model.module.dense.load_state_dict(
            {"weight": new["dense.weight"], "bias": new["dense.bias"]}
        )


def check(model: Any, batches: Sequence[Any], expected: Expected, number: int) -> int:
    """Looks batch `number` up, compares it with the version that it says it is of, and returns the
    number of that."""
    batch = number % len(batches)
    with torch.no_grad():
        output = model(batches[batch])
    version = number_of(version_of(model))
    models.assert_same_bits(output, expected.of(version, batch))
    return version

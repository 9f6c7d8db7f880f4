"""A model and batches for TorchRec's pipelines, and what the model gives without them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.streamable import Pipelineable

from tests.distributed import models
from tests.distributed.forwards.test_forwards import KINDS, Rows, by_name
from torchrec_bls import BLSConfig

STEPS = 5


@dataclass
class Batch(Pipelineable):  # type: ignore[misc]
    """Ids of both modules. `fails_at` names the place of an exception in the dense part."""

    rows: Any
    pooled: Any
    dense: torch.Tensor
    fails_at: int | None = None
    error: type[BaseException] = ArithmeticError

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return self

    def record_stream(self, stream: Any) -> None:
        pass


class Place(nn.Module):
    """Where the dense part uses embeddings, or fails before. A leaf for TorchRec's tracing."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def forward(self, batch: Batch, embeddings: Any) -> Any:
        if batch.fails_at == self._at:
            raise batch.error("by order")
        return models.arrived(embeddings)


class Head(nn.Module):
    """Gives every embedding and the dense weights a gradient. A leaf for TorchRec's tracing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.dense = nn.Linear(4, 1)

    def forward(self, dense: torch.Tensor, rows: Any, pooled: Any) -> tuple[torch.Tensor, Any]:
        loss = sum(each.values().sum() for each in rows.values()) + pooled.values().sum()
        return loss * self.dense(dense).mean(), [by_name(rows), by_name(pooled)]


class Model(nn.Module):
    """Both modules, and a place of failure before, between and behind their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.pooled = models.EC.module(), models.EBC.module()
        self.before, self.between, self.behind = Place(0), Place(1), Place(2)
        self.head = Head()

    def forward(self, batch: Batch) -> tuple[torch.Tensor, list[Rows]]:
        self.before(batch, batch.dense)
        rows = self.between(batch, self.rows(batch.rows))
        pooled = self.behind(batch, self.pooled(batch.pooled))
        result: tuple[torch.Tensor, list[Rows]] = self.head(batch.dense, rows, pooled)
        return result


def sharded(name: str, lookup: str = "exchange", bound: int = 0) -> DistributedModelParallel:
    config = BLSConfig(deadline=60, lookup=lookup, name=name, bound=bound)
    sharders = [kind.bls_sharder(config) for kind in KINDS.values()]
    model = Model()
    plans = {
        part: models.make_plan(
            getattr(model, part),
            # TorchRec averages a feature of a row-wise table in other tables, too.
            [("row_wise", "table_wise")[table % 2] for table in range(kind.tables)],
            sharder,
        )
        for (part, kind), sharder in zip(KINDS.items(), sharders, strict=True)
    }
    return models.shard_model(model, plans, sharders)


def make_batch(rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids = {name: models.make_ids(kind, 100 * rank + step, 3) for name, kind in KINDS.items()}
    return Batch(ids["rows"], ids["pooled"], torch.rand(3, 4, generator=generator))


FAULTS: dict[str, Any] = {
    "bad rows": {"rows": torch.zeros(1)},
    "bad pooled": {"pooled": torch.zeros(1)},
    **{f"fails at {at}": {"fails_at": at} for at in range(3)},
}


def with_fault(batch: Batch, fault: str) -> Batch:
    return replace(batch, **FAULTS[fault])


def batches(rank: int, faults: dict[int, str], steps: int = STEPS) -> Iterator[Batch]:
    """Yields batches, of which those whose numbers `faults` has are bad."""
    for step in range(steps):
        batch = make_batch(rank, step)
        yield with_fault(batch, faults[step]) if step in faults else batch


def compare(output: list[Rows], batch: Batch) -> None:
    """Compares with unsharded modules, whose weights are those before any training."""
    _, wanted = Model()(batch)
    for rows, of_batch in zip(output, wanted, strict=True):
        torch.testing.assert_close(rows, of_batch)  # sums are of another order


def not_all_batches(*arguments: Any, **options: Any) -> Any:
    return TrainPipelineSparseDist(*arguments, execute_all_batches=False, **options)


PIPELINES: dict[str, Any] = {
    "TrainPipelineBase": TrainPipelineBase,
    "TrainPipelineSparseDist": TrainPipelineSparseDist,
    "without execute_all_batches": not_all_batches,
    "EvalPipelineSparseDist": EvalPipelineSparseDist,
}


def make_pipeline(
    name: str, model: DistributedModelParallel, trains: bool = False, **options: Any
) -> Any:
    optimizer = torch.optim.SGD(model.module.head.parameters(), lr=0.01)
    model.train(trains)
    return PIPELINES[name](model, optimizer, models.CPU, **options)

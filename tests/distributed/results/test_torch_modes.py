"""Bounded-lag modules within torch.compile, torch.inference_mode and torch.autocast."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import DataType

from tests.distributed import models
from tests.distributed.results.test_training import loss_of, state_of
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import BLSConfig, BoundedLagPipeline

KINDS = {kind.name: kind for kind in (models.EC, models.EBC, models.WEIGHTED)}
CONFIG = BLSConfig(deadline=60)


class Dense(nn.Module):
    """Something to compile on both sides of the embeddings."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.rand(1))

    def forward(self, batch: models.Batch) -> torch.Tensor:
        scale = torch.sigmoid(self.scale) + 1
        embeddings = models.arrived(self.embeddings(batch.ids))
        return torch.tanh(loss_of(embeddings) * scale) + scale


def train(model: nn.Module, kind: models.Kind, rank: int) -> list[torch.Tensor]:
    outputs = []
    for step in range(4):
        batch = models.Batch(models.make_ids(kind, 100 * rank + step, 4 + step % 2))
        with torch.no_grad():
            outputs.append(model(batch))
        output = model(batch)
        output.sum().backward()
        outputs.append(output.detach())
    return outputs


def compile_model(rank: int, kind: models.Kind) -> None:
    eager, model = (
        dense(kind, kind.bls_sharder(replace(CONFIG, name=name))) for name in ("eager", "compiled")
    )
    expected = train(eager, kind, rank)
    outputs = train(torch.compile(model, backend="eager"), kind, rank)
    for output, wanted in zip(outputs, expected, strict=True):
        assert torch.equal(output, wanted)
    models.assert_same_bits(state_of(model), state_of(eager))


def dense(kind: models.Kind, sharder: ModuleSharder[Any]) -> DistributedModelParallel:
    module = kind.module()
    plan = models.make_plan(module, models.sharding_types(kind, "mixed", 1), sharder)
    return models.shard_model(Dense(module), {"embeddings": plan}, [sharder])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_model_computes_and_trains_as_an_eager_one(kind: str) -> None:
    run(2, compile_model, KINDS[kind], deadline=240)


def forward_in_inference_mode(rank: int, kind: models.Kind) -> None:
    batches = [models.Batch(models.make_ids(kind, 100 * rank + step, 4)) for step in range(5)]
    with torch.no_grad():
        theirs = models.shard(kind, "mixed", kind.torchrec_sharder())
        expected = [models.flatten(theirs(batch)) for batch in batches]
    model = models.shard(kind, "mixed", kind.bls_sharder(CONFIG))
    with torch.inference_mode():
        for batch, wanted in zip(batches, expected, strict=True):
            models.assert_same_bits(models.flatten(model(batch)), wanted)
    piped = models.shard(kind, "mixed", kind.bls_sharder(BLSConfig(bound=1, deadline=60)))
    pipeline, data = BoundedLagPipeline(piped), iter(batches)
    with torch.inference_mode():
        for wanted in expected:
            models.assert_same_bits(models.flatten(pipeline.progress(data)), wanted)
    # Nothing of it is left to training.
    loss_of(models.arrived(model(batches[0]))).backward()
    loss_of(models.arrived(theirs(batches[0]))).backward()
    models.assert_same_bits(state_of(model), state_of(theirs))


@pytest.mark.parametrize("kind", slow_but(["weighted"], KINDS))
def test_inference_mode(kind: str) -> None:
    run(2, forward_in_inference_mode, KINDS[kind])


def of_data_type(kind: models.Kind, data_type: DataType) -> nn.Module:
    module: Any = kind.module()
    if isinstance(module, EmbeddingCollection):
        configs: Any = module.embedding_configs()
        collection: Callable[..., nn.Module] = EmbeddingCollection
    else:
        configs, collection = module.embedding_bag_configs(), EmbeddingBagCollection
    for config in configs:
        config.data_type = data_type
    torch.manual_seed(0)
    arguments = {"is_weighted": True} if kind.name == "weighted" else {}
    return collection(tables=configs, **arguments)


def compare_under(
    rank: int, kind: models.Kind, data_type: DataType, mode: AbstractContextManager[Any]
) -> None:
    outputs: list[list[dict[str, torch.Tensor]]] = []
    states = []
    for sharder in (kind.torchrec_sharder(), kind.bls_sharder(CONFIG)):
        module = of_data_type(kind, data_type)
        plan = models.make_plan(module, models.sharding_types(kind, "mixed", 1), sharder)
        model = models.shard_model(models.SparseOnly(module), {"embeddings": plan}, [sharder])
        outputs.append([])
        for step in range(3):
            batch = models.Batch(models.make_ids(kind, 100 * rank + step, 4))
            with mode:
                with torch.no_grad():
                    outputs[-1].append(as_float(models.flatten(model(batch))))
                output = models.arrived(model(batch))
                loss = loss_of(output)
            loss.float().backward()
            outputs[-1].append(as_float(models.flatten(output)))
        states.append(as_float(state_of(model)))
    theirs, ours = outputs
    for output, wanted in zip(ours, theirs, strict=True):
        models.assert_same_bits(output, wanted)
    models.assert_same_bits(states[1], states[0])


def as_float(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keeps all bits; the name says what they were."""
    return {
        f"{name} {t.dtype}": t.float() if t.is_floating_point() else t
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("kind", slow_but(["ebc"], KINDS))
def test_autocast_gives_torchrecs_bits(kind: str) -> None:
    mode = torch.autocast("cpu", dtype=torch.bfloat16)
    run(2, compare_under, KINDS[kind], DataType.FP32, mode)


@pytest.mark.parametrize("kind", slow_but(["weighted"], KINDS))
def test_tables_of_half_precision_give_torchrecs_bits(kind: str) -> None:
    run(2, compare_under, KINDS[kind], DataType.FP16, torch.enable_grad())

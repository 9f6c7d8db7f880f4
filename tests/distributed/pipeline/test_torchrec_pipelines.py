"""TorchRec's own pipelines, which fuse the exchanges of splits, train bounded-lag modules."""

from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    train_pipelines,
)
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDistLite
from torchrec.distributed.types import ModuleSharder

from tests.distributed import models
from tests.distributed.results.test_training import OPTIMIZERS, loss_of, state_of
from tests.processes import run, run_outcomes
from tests.tiers import slow_but
from torchrec_bls import BLSConfig, bounded_lag_channels

KINDS = {kind.name: kind for kind in (models.EC, models.EBC, models.WEIGHTED)}
# Of one type and of all: what a type does alone is tested without a pipeline.
SHARDINGS = ["table_wise", "mixed"]
STEPS = 5
PIPELINES = {
    pipeline.__name__: pipeline
    for pipeline in (
        TrainPipelineBase,
        TrainPipelineSparseDist,
        TrainPipelineSparseDistLite,
        EvalPipelineSparseDist,
    )
}
KEPT = [
    ("ec", "mixed", "TrainPipelineBase"),
    ("ebc", "mixed", "TrainPipelineSparseDist"),
    ("weighted", "mixed", "TrainPipelineSparseDistLite"),
    ("ec", "mixed", "EvalPipelineSparseDist"),
]


class Head(nn.Module):
    """Gives every embedding and the dense weights a gradient. A leaf for TorchRec's tracing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.dense = nn.Linear(4, 1)

    def forward(self, dense: torch.Tensor, embeddings: Any) -> tuple[torch.Tensor, Any]:
        embeddings = models.arrived(embeddings)
        return loss_of(embeddings) * self.dense(dense).mean(), embeddings


class Model(nn.Module):
    """Returns what TorchRec's pipelines ask for: the loss and the output."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.head = Head()

    def forward(self, batch: Batch) -> tuple[torch.Tensor, Any]:
        result: tuple[torch.Tensor, Any] = self.head(
            batch.dense_features, self.embeddings(batch.sparse_features)
        )
        return result


def sharded(
    kind: models.Kind, sharding: str, sharder: ModuleSharder[Any], nodes: int = 1
) -> DistributedModelParallel:
    module = kind.module()
    plan = models.make_plan(module, models.sharding_types(kind, sharding, nodes), sharder, nodes)
    return models.shard_model(Model(module), {"embeddings": plan}, [sharder])


def batches(kind: models.Kind, rank: int, steps: int = STEPS) -> Iterator[Batch]:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        yield Batch(
            torch.rand(5, 4, generator=generator),
            models.make_ids(kind, 100 * rank + step, 5),
            torch.empty(0),
        )


def make_pipeline(name: str, model: DistributedModelParallel) -> Any:
    optimizer = torch.optim.SGD(model.module.head.parameters(), lr=0.01)
    model.train(not name.startswith("Eval"))
    return PIPELINES[name](model, optimizer, models.CPU)


def outputs_of(pipeline: Any, data: Iterator[Batch]) -> list[dict[str, torch.Tensor]]:
    outputs = []
    while True:
        try:
            outputs.append(models.flatten(pipeline.progress(data)))
        except StopIteration:
            return outputs


def trained(
    name: str, model: DistributedModelParallel, kind: models.Kind, rank: int
) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    outputs = outputs_of(make_pipeline(name, model), batches(kind, rank))
    head = {name: p.detach().clone() for name, p in model.module.head.named_parameters()}
    return outputs, state_of(model) | head


def refuse_all_to_alls(*_: Any, **__: Any) -> None:
    raise AssertionError("a bounded-lag module needs no exchange of the process group")


def train_in_pipelines(rank: int, kind: models.Kind, sharding: str, name: str) -> None:
    fused = OPTIMIZERS["rowwise-adagrad"]
    theirs = sharded(kind, sharding, kind.torchrec_sharder(fused))
    ours = sharded(kind, sharding, kind.bls_sharder(BLSConfig(deadline=30), fused))
    before = {name: shard.clone() for name, (_, _, shard) in models.local_shards(ours).items()}
    expected, expected_state = trained(name, theirs, kind, rank)
    with mock.patch.object(dist, "all_to_all_single", refuse_all_to_alls):
        outputs, state = trained(name, ours, kind, rank)
    assert len(outputs) == len(expected) == STEPS
    for output, wanted in zip(outputs, expected, strict=True):
        models.assert_same_bits(output, wanted)
    models.assert_same_bits(state, expected_state)
    changed = any(not torch.equal(state[name], shard) for name, shard in before.items())
    assert changed or name.startswith("Eval")
    # EvalPipelineSparseDist exchanges the ids of its first batch twice.
    posts = STEPS + name.startswith("Eval")
    ids = [channel for channel in bounded_lag_channels(ours) if channel.name.endswith(".ids")]
    assert [channel.stats().messages for channel in ids] == [posts] * len(ids)


@pytest.mark.parametrize(
    ("kind", "sharding", "name"), slow_but(KEPT, product(KINDS, SHARDINGS, PIPELINES))
)
def test_outputs_weights_and_optimizer_states_are_torchrecs(
    kind: str, sharding: str, name: str
) -> None:
    run(2, train_in_pipelines, KINDS[kind], sharding, name)


class TwoModules(nn.Module):
    """A module of each sharder, both on the ids of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = Model(models.EC.module())
        self.theirs = Model(models.EBC.module())

    def forward(self, batch: Batch) -> tuple[torch.Tensor, Any]:
        (first, embeddings), (second, _) = self.ours(batch), self.theirs(batch)
        return first + second, embeddings


def train_beside_torchrecs_module(rank: int) -> None:
    results = []
    for sharder in (models.EC.torchrec_sharder(), models.EC.bls_sharder(BLSConfig(deadline=30))):
        other = models.EBC.torchrec_sharder()
        model = TwoModules()
        plans = {
            "ours.embeddings": models.make_plan(
                model.ours.embeddings, models.sharding_types(models.EC, "mixed", 1), sharder
            ),
            "theirs.embeddings": models.make_plan(
                model.theirs.embeddings, models.sharding_types(models.EBC, "mixed", 1), other
            ),
        }
        sharded_model = models.shard_model(model, plans, [sharder, other])
        optimizer = torch.optim.SGD(model.ours.head.parameters(), lr=0.01)
        pipeline = TrainPipelineSparseDist(sharded_model, optimizer, models.CPU)
        results.append((outputs_of(pipeline, batches(models.EC, rank)), state_of(sharded_model)))
    (expected, expected_state), (outputs, state) = results
    for output, wanted in zip(outputs, expected, strict=True):
        models.assert_same_bits(output, wanted)
    models.assert_same_bits(state, expected_state)


def test_beside_a_module_of_torchrecs_own_sharder() -> None:
    run(2, train_beside_torchrecs_module)


def detach_and_attach(rank: int, kind: models.Kind) -> None:
    results = []
    for sharder in (kind.torchrec_sharder(), kind.bls_sharder(BLSConfig(deadline=30))):
        model = sharded(kind, "mixed", sharder)
        pipeline = make_pipeline("TrainPipelineSparseDist", model)
        outputs = outputs_of(pipeline, batches(kind, rank, 2))
        detached = pipeline.detach()
        with torch.no_grad():
            outputs.append(models.flatten(detached(next(batches(kind, rank)))[1]))
        pipeline.attach(detached)
        outputs += outputs_of(pipeline, batches(kind, rank, 2))
        results.append(outputs)
    expected, outputs = results
    assert len(outputs) == 5
    for output, wanted in zip(outputs, expected, strict=True):
        models.assert_same_bits(output, wanted)


@pytest.mark.parametrize("kind", slow_but(["weighted"], KINDS))
def test_a_detached_model_is_called_as_before(kind: str) -> None:
    run(2, detach_and_attach, KINDS[kind])


def evaluate_at_a_bound(rank: int, kind: models.Kind) -> None:
    model = sharded(kind, "mixed", kind.bls_sharder(BLSConfig(bound=1, deadline=30)))
    pipeline = make_pipeline("EvalPipelineSparseDist", model)
    with (
        torch.no_grad(),
        pytest.raises(
            ValueError, match=r"module of bound 1, .*: use BoundedLagPipeline, or BLSCon"
        ),
    ):
        pipeline.progress(batches(kind, rank))


@pytest.mark.parametrize("kind", slow_but(["ec"], KINDS))
def test_other_bounds_are_for_the_bounded_lag_pipeline(kind: str) -> None:
    run(2, evaluate_at_a_bound, KINDS[kind])


def fail_without_a_gpu(rank: int, name: str) -> None:
    model = sharded(models.EBC, "table_wise", models.EBC.torchrec_sharder())
    optimizer = torch.optim.SGD(model.module.head.parameters(), lr=0.01)
    pipeline = getattr(train_pipelines, name)(model, optimizer, models.CPU)
    pipeline.progress(batches(models.EBC, rank))


# The day they work, they belong to PIPELINES.
@pytest.mark.parametrize(
    "name",
    slow_but(
        ["EvalPipelineFusedSparseDist", "TrainPipelineSemiSync"],
        [
            "EvalPipelineFusedSparseDist",
            "PrefetchTrainPipelineSparseDist",
            "TrainPipelineFusedSparseDist",
            "TrainPipelineSemiSync",
        ],
    ),
)
def test_pipelines_that_torchrec_cannot_run_on_cpu(name: str) -> None:
    outcomes = run_outcomes(2, fail_without_a_gpu, name)
    # The last is of torch's CUDA build, on a host without a GPU.
    errors = {"AssertionError", "RuntimeError", "AttributeError"}
    assert {outcome.error for outcome in outcomes} <= errors


def detach_in_flight(rank: int, kind: models.Kind, evaluates: bool) -> None:
    fused = OPTIMIZERS["rowwise-adagrad"]
    steps = 6
    expected: list[dict[str, torch.Tensor]] = []
    states = []
    for detaches in (False, True):
        model = sharded(kind, "mixed", kind.bls_sharder(BLSConfig(deadline=60), fused))
        pipeline = make_pipeline("TrainPipelineSparseDist", model)
        source = batches(kind, rank, steps)
        outputs = []
        for step in range(steps):
            outputs.append(models.flatten(pipeline.progress(source)))
            if detaches and step in (1, 2):
                detached = pipeline.detach()
                if evaluates:
                    with torch.no_grad():
                        models.arrived(detached(next(batches(kind, rank)))[1])
        with pytest.raises(StopIteration):
            pipeline.progress(source)
        head = {name: p.detach().clone() for name, p in model.module.head.named_parameters()}
        states.append(state_of(model) | head)
        if not detaches:
            expected = outputs
    for output, wanted in zip(outputs, expected, strict=True):
        models.assert_same_bits(output, wanted)
    models.assert_same_bits(*states)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("kind", slow_but(["ec", "ebc"], KINDS))
def test_a_training_goes_on_after_a_detach_in_flight(kind: str, evaluates: bool) -> None:
    run(2, detach_in_flight, KINDS[kind], evaluates)

"""A model with batches in a pipeline is the pipeline's; one thread at a time calls a module."""

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.distributed import models
from tests.distributed.dlrm import make_batch, make_dlrm
from tests.distributed.pipeline.test_pipeline import flat, one_by_one, sharder
from tests.processes import run
from tests.quant import models as quant
from tests.tiers import slow_but
from torchrec_bls import BLSConfig, BoundedLagPipeline, bounded_lag_channels
from torchrec_bls.errors import BLSError, PipelineError


def of_kind(kind: models.Kind) -> Any:
    config = BLSConfig(bound=2, deadline=60)
    return models.shard(kind, "table_wise", kind.bls_sharder(config))


def processed() -> Any:
    """Returns an EmbeddingBagCollection with feature processors, which is the module called."""
    kind = models.WEIGHTED
    inner: Any = kind.module()
    processors = PositionWeightedModuleCollection(dict.fromkeys(kind.features, 5))
    module = FeatureProcessedEmbeddingBagCollection(inner, processors)
    config = BLSConfig(bound=2, deadline=60)
    of_bags: Any = kind.bls_sharder(config)
    plan = models.make_plan(inner, ["table_wise"] * kind.tables, of_bags)
    outer = FeatureProcessedEmbeddingBagCollectionSharder(of_bags)
    return models.shard_model(models.SparseOnly(module), {"embeddings": plan}, [outer])


def quantized() -> Any:
    config = BLSConfig(lookup="exchange", bound=2, deadline=60)
    return quant.shard(
        quant.model_of("ebc", ["int8"] * 4), quant.sharder_of("ebc", config), "table_wise"
    )


MODELS: dict[str, Callable[[], Any]] = {
    "ec": lambda: of_kind(models.EC),
    "ebc": lambda: of_kind(models.EBC),
    "processed": processed,
    "quantized": quantized,
}


def batch_of(name: str, rank: int, step: int) -> models.Batch:
    seed = 100 * rank + step
    if name == "quantized":
        return models.Batch(quant.make_ids("ebc", seed, 3))
    return models.Batch(models.make_ids(models.EC if name == "ec" else models.EBC, seed, 3))


def posts(model: nn.Module) -> list[int]:
    return [channel.stats().messages for channel in bounded_lag_channels(model)]


def call_beside_a_pipeline(rank: int, name: str) -> None:
    model = MODELS[name]()
    batches = [batch_of(name, rank, step) for step in range(8)]
    with torch.no_grad():
        expected = [models.flatten(model(batch)) for batch in batches]
    pipeline: BoundedLagPipeline[Any, Any] = BoundedLagPipeline(model)
    source = iter(batches)
    outputs = [models.flatten(pipeline.progress(source)) for _ in range(2)]
    before = posts(model)
    errors: list[BaseException] = []

    def call() -> None:
        with pytest.raises(ValueError, match=r"belongs to a BoundedLagPipeline, .*detach\(\)"):
            model(batches[0])
        with pytest.raises(ValueError, match="belongs to another BoundedLagPipeline"):
            BoundedLagPipeline(model)

    def call_in_a_thread() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    call()
    thread = threading.Thread(target=call_in_a_thread)
    thread.start()
    thread.join()
    assert not errors
    assert posts(model) == before
    with pytest.raises(StopIteration):
        while True:
            outputs.append(models.flatten(pipeline.progress(source)))
    for output, wanted in zip(outputs, expected, strict=True):
        models.assert_same_bits(output, wanted)
    with pytest.raises(ValueError, match=r"belongs to a BoundedLagPipeline, so detach\(\) it"):
        model(batches[0])
    pipeline.detach()
    with torch.no_grad():
        models.assert_same_bits(models.flatten(model(batches[0])), expected[0])


@pytest.mark.parametrize("name", slow_but(["ec", "quantized", "processed"], MODELS))
def test_a_model_in_a_pipeline_is_called_by_it_alone(name: str) -> None:
    run(2, call_beside_a_pipeline, name)


class Meanwhile(nn.Module):
    """Has something done in the middle of the dense part; a leaf for tracing."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Any = None

    def forward(self, values: Any) -> Any:
        if self.work is not None:
            self.work()
        return values


class LateLookup(models.SparseOnly):
    """Calls something before its embeddings, which the pipeline has prepared."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__(embeddings)
        self.meanwhile = Meanwhile()

    def forward(self, batch: models.Batch) -> Any:
        self.meanwhile(batch.ids)
        return self.embeddings(batch.ids)


def call_during_progress(rank: int) -> None:
    kind = models.EBC
    module = kind.module()
    by = kind.bls_sharder(BLSConfig(bound=2, deadline=60))
    plan = models.make_plan(module, ["table_wise"] * kind.tables, by)
    model = models.shard_model(LateLookup(module), {"embeddings": plan}, [by])
    batches = [batch_of("ebc", rank, step) for step in range(6)]
    with torch.no_grad():
        expected = [models.flatten(model(batch)) for batch in batches]
    pipeline: BoundedLagPipeline[Any, Any] = BoundedLagPipeline(model)
    errors: list[BaseException] = []

    def in_a_thread() -> None:
        for call in (lambda: model.module.embeddings(batches[0].ids), lambda: pipeline.drain()):
            try:
                call()
            except BaseException as error:
                errors.append(error)

    def work() -> None:
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()

    source = iter(batches)
    outputs = [models.flatten(pipeline.progress(source))]
    model.module.meanwhile.work = work
    outputs.append(models.flatten(pipeline.progress(source)))
    model.module.meanwhile.work = None
    assert all(isinstance(error, ValueError) for error in errors), errors
    assert [str(error)[:25] for error in errors] == [
        "'embeddings' belongs to a",
        "the pipeline is in a call",
    ]
    with pytest.raises(StopIteration):
        while True:
            outputs.append(models.flatten(pipeline.progress(source)))
    for output, wanted in zip(outputs, expected, strict=True):
        models.assert_same_bits(output, wanted)


def test_another_thread_gets_nothing_of_a_progress_under_way() -> None:
    run(2, call_during_progress)


def drop_a_pipeline(rank: int, name: str) -> None:
    model = MODELS[name]()
    batches = [batch_of(name, rank, step) for step in range(8)]
    with torch.no_grad():
        expected = [models.flatten(model(batch)) for batch in batches]
    for again in range(2):
        pipeline: BoundedLagPipeline[Any, Any] = BoundedLagPipeline(model)
        source = iter(batches)
        for wanted in expected[:3]:
            models.assert_same_bits(models.flatten(pipeline.progress(source)), wanted)
        del pipeline
        gc.collect()
        if again:  # at the second time the next caller is a pipeline
            with torch.no_grad():
                models.assert_same_bits(models.flatten(model(batches[5])), expected[5])


@pytest.mark.parametrize("name", slow_but(["ebc", "quantized"], MODELS))
def test_a_collected_pipeline_gives_its_model_back(name: str) -> None:
    run(2, drop_a_pipeline, name)


def fail_a_pipeline(rank: int) -> None:
    model = make_dlrm(sharder(1))
    pipeline = BoundedLagPipeline[Batch, Any](model)
    source = iter([make_batch(rank, step) for step in range(20)])
    pipeline.progress(source)

    def function() -> None:
        if rank == 0:
            raise OSError("no such checkpoint")

    pipeline.update(function)
    with pytest.raises(BLSError):
        while True:
            pipeline.progress(source)
    assert pipeline.detach() is model
    with pytest.raises(BLSError), torch.no_grad():
        model(make_batch(rank, 0))


def test_a_failed_pipeline_can_be_detached() -> None:
    run(2, fail_a_pipeline)


def load_at_times(rank: int, bound: int) -> None:
    model = make_dlrm(sharder(bound))
    batches = [make_batch(rank, step) for step in range(24)]
    old = one_by_one(model, batches)
    state = copy.deepcopy(dict(model.module.model.over_arch.state_dict()))
    new_weights = {name: tensor + 1 for name, tensor in state.items()}
    pipeline = BoundedLagPipeline[Batch, Any](model)
    source = iter(batches)
    models.assert_same_bits(flat(pipeline.progress(source)), old[0])
    for load in (
        lambda: model.load_state_dict(model.state_dict()),
        lambda: model.module.load_state_dict(model.module.state_dict()),
        lambda: model.module.model.over_arch.load_state_dict(new_weights),
    ):
        if bound:
            with pytest.raises(ValueError, match=r"load by its update\(\), or call drain\(\)"):
                load()
    models.assert_same_bits(flat(pipeline.progress(source)), old[1])
    pipeline.update(lambda: model.module.model.over_arch.load_state_dict(new_weights))
    outputs = [flat(pipeline.progress(source)) for _ in range(2 * bound + 4)]
    assert not torch.equal(outputs[-1]["logits"], old[2 * bound + 5]["logits"])
    pipeline.drain()
    model.module.model.over_arch.load_state_dict(state)
    at = 2 * bound + 6 + 2 * bound
    for wanted in old[at : at + 2]:
        models.assert_same_bits(flat(pipeline.progress(source)), wanted)
    # A write that nobody announces costs the outputs that it would mix up.
    with torch.no_grad():
        for parameter in model.module.model.over_arch.parameters():
            parameter.add_(0)
    errors = []
    for answer in pipeline.drain():
        if isinstance(answer, PipelineError):
            errors.append(answer)
    looked_up = min(bound, len(batches) - at - 2)
    assert len(errors) == looked_up
    assert all("written to after its embeddings were looked up" in str(e) for e in errors)


@pytest.mark.parametrize("bound", slow_but([1], [0, 1, 2]))
def test_weights_are_loaded_between_batches_only(bound: int) -> None:
    run(2, load_at_times, bound)


def call_from_two_threads(rank: int, name: str) -> None:
    """On rank 0 another thread calls in the middle of a forward, and at last alone."""
    kind = models.EC if name == "ec" else models.EBC
    module = kind.module()
    by = kind.bls_sharder(BLSConfig(deadline=60))
    plan = models.make_plan(module, ["table_wise"] * kind.tables, by)
    model = models.shard_model(LateLookup(module), {"embeddings": plan}, [by])
    batches = [batch_of(name, rank, step) for step in range(4)]
    answers: list[Any] = []

    def call() -> None:
        try:
            with torch.no_grad():
                answers.append(models.flatten(model(batches[3])))
        except BaseException as error:
            answers.append(error)

    def in_a_thread() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    with torch.no_grad():
        expected = [models.flatten(model(batch)) for batch in batches]
        if rank == 0:
            model.module.meanwhile.work = in_a_thread

            def once() -> None:
                model.module.meanwhile.work = None
                in_a_thread()

            model.module.meanwhile.work = once
        models.assert_same_bits(models.flatten(model(batches[1])), expected[1])
        if rank == 0:
            (error,) = answers
            assert isinstance(error, ValueError) and "one thread at a time" in str(error)
            answers.clear()
        output = model(batches[2])  # not waited for
        if rank == 0:
            in_a_thread()
            (error,) = answers
            assert isinstance(error, ValueError) and "has not waited" in str(error)
            answers.clear()
        models.assert_same_bits(models.flatten(output), expected[2])
    in_a_thread()
    models.assert_same_bits(answers[0], expected[3])


@pytest.mark.parametrize("name", slow_but(["ec"], ["ec", "ebc"]))
def test_a_second_thread_is_refused_and_harms_nobody(name: str) -> None:
    run(2, call_from_two_threads, name)

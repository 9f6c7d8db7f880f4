"""BoundedLagPipeline gives the model's results in order, ends, and fails clearly."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipeline
from torchrec.models.dlrm import DLRM, DLRMTrain

from tests.distributed import models
from tests.distributed.dlrm import BatchedDLRM, make_batch, make_dlrm
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BoundedLagPipeline,
)
from torchrec_bls.errors import BadBatchError, PipelineError

BOUNDS = [0, 1, 2, 4]


def sharder(
    bound: int, deadline: float = 60, transport: str = "auto"
) -> BLSEmbeddingBagCollectionSharder:
    config = BLSConfig(bound=bound, deadline=deadline, transport=transport)
    return BLSEmbeddingBagCollectionSharder(models.SGD, config=config)


def flat(output: Any) -> dict[str, torch.Tensor]:
    """Returns the logits of a DLRM, or loss, logits and labels of a DLRMTrain."""
    if isinstance(output, torch.Tensor):
        return {"logits": output}
    loss, (same_loss, logits, labels) = output
    assert torch.equal(loss, same_loss)
    return {"loss": loss, "logits": logits, "labels": labels}


def one_by_one(model: nn.Module, batches: list[Batch]) -> list[dict[str, torch.Tensor]]:
    with torch.no_grad():
        return [flat(model(batch)) for batch in batches]


def drain(pipeline: TrainPipeline[Any, Any], batches: Iterator[Batch]) -> list[Any]:
    """Returns what progress gives until it stops; more calls stop again."""
    outputs = []
    with pytest.raises(StopIteration):
        while True:
            outputs.append(pipeline.progress(batches))
    with pytest.raises(StopIteration):
        pipeline.progress(batches)
    return outputs


def pipe_dlrm(rank: int, wrapper: type[nn.Module]) -> None:
    batches = [make_batch(rank, step) for step in range(12)]
    expected = one_by_one(make_dlrm(EmbeddingBagCollectionSharder(), wrapper), batches)
    for bound in BOUNDS:
        pipeline = BoundedLagPipeline[Batch, Any](make_dlrm(sharder(bound), wrapper))
        # From none to more than the 2 x bound + 1 that fill it; it starts again after each end.
        for count in (0, 1, 2, 3, 12):
            outputs = drain(pipeline, iter(batches[:count]))
            assert len(outputs) == count
            for output, wanted in zip(outputs, expected, strict=False):
                models.assert_same_bits(flat(output), wanted)
                assert not any(tensor.requires_grad for tensor in flat(output).values())


@pytest.mark.parametrize(
    "wrapper",
    [pytest.param(BatchedDLRM, marks=pytest.mark.smoke), *slow_but([], [DLRMTrain])],
)
def test_results_come_in_order_and_are_those_of_torchrec_batch_by_batch(
    wrapper: type[nn.Module],
) -> None:
    run(2, pipe_dlrm, wrapper)


def take_ahead(rank: int, bound: int) -> list[int]:
    taken: list[int] = []

    def load() -> Iterator[Batch]:
        for step in range(20):
            taken.append(step)
            yield make_batch(rank, step)

    pipeline = BoundedLagPipeline[Batch, Any](make_dlrm(sharder(bound)))
    batches, ahead = load(), []
    for finished in range(1, 6):
        pipeline.progress(batches)
        ahead.append(len(taken) - finished)
    return ahead


@pytest.mark.parametrize("bound", slow_but([3], [0, 1, 3]))
def test_batches_are_taken_twice_the_bound_ahead(bound: int) -> None:
    assert run(2, take_ahead, bound) == [[2 * bound] * 5] * 2


def use_a_smaller_bound(rank: int) -> None:
    batches = [make_batch(rank, step) for step in range(6)]
    model = make_dlrm(sharder(4))
    expected = one_by_one(model, batches)
    outputs = drain(BoundedLagPipeline[Batch, Any](model, bound=1), iter(batches))
    for output, wanted in zip(outputs, expected, strict=True):
        models.assert_same_bits(flat(output), wanted)
    for bound in (-1, 5):
        with pytest.raises(
            ValueError, match=f"bound is {bound}, but the sharders' config allows from 0 to 4"
        ):
            BoundedLagPipeline(model, bound=bound)


def test_the_bound_may_be_smaller_than_the_sharders_but_not_larger() -> None:
    run(2, use_a_smaller_bound)


def detach(rank: int) -> None:
    batches = [make_batch(rank, step) for step in range(4)]
    model = make_dlrm(sharder(1))
    expected = one_by_one(model, batches)
    pipeline = BoundedLagPipeline[Batch, Any](model)
    source = iter(batches)
    pipeline.progress(source)
    with pytest.raises(ValueError, match="batches are under way: call progress until it raises"):
        pipeline.detach()
    drain(pipeline, source)
    assert pipeline.detach() is model
    for output, wanted in zip(one_by_one(model, batches), expected, strict=True):
        models.assert_same_bits(output, wanted)
    # A detached model can be piped anew, and by the same pipeline.
    for again in (pipeline, BoundedLagPipeline[Batch, Any](model)):
        outputs = drain(again, iter(batches))
        for output, wanted in zip(outputs, expected, strict=True):
            models.assert_same_bits(flat(output), wanted)
        again.detach()


def test_a_detached_model_is_as_before() -> None:
    run(2, detach)


class Fuse(nn.Module):
    """Raises at the batch whose labels say so; a module, so that tracing leaves it whole."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if (labels == 666).any():
            raise ZeroDivisionError("the fuse has blown")
        return logits


class FusedDLRM(BatchedDLRM):
    def __init__(self, dlrm: DLRM) -> None:
        super().__init__(dlrm)
        self.fuse = Fuse()

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.fuse(super().forward(batch), batch.labels)


def outcomes(
    pipeline: BoundedLagPipeline[Batch, Any], batches: Iterator[Batch]
) -> list[dict[str, torch.Tensor] | PipelineError]:
    """Returns what progress returns or raises for each batch until it stops."""
    answers: list[dict[str, torch.Tensor] | PipelineError] = []
    while True:
        try:
            answers.append(flat(pipeline.progress(batches)))
        except PipelineError as error:
            answers.append(error)
        except StopIteration:
            return answers


def assert_only_failed(
    answers: list[dict[str, torch.Tensor] | PipelineError],
    expected: list[dict[str, torch.Tensor]],
    failed: set[int],
) -> None:
    """Checks that there is the right output for every batch but those that `failed`."""
    assert {i for i, answer in enumerate(answers) if isinstance(answer, PipelineError)} == failed
    for number, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        if isinstance(answer, PipelineError):
            assert answer.iteration == number
        else:
            models.assert_same_bits(answer, wanted)


def fail_in_the_model(rank: int, bound: int, iteration: int) -> None:
    batches = [make_batch(rank, step) for step in range(12)]
    expected = one_by_one(make_dlrm(sharder(bound), FusedDLRM), batches)
    if rank == 1:
        batches[iteration].labels[0] = 666
    pipeline = BoundedLagPipeline[Batch, Any](make_dlrm(sharder(bound), FusedDLRM))
    answers = outcomes(pipeline, iter(batches))
    assert_only_failed(answers, expected, {iteration} if rank == 1 else set())
    if rank == 1:
        error = answers[iteration]
        assert isinstance(error, PipelineError) and not isinstance(error, ValueError)
        assert isinstance(error.__cause__, ZeroDivisionError)
        assert (
            str(error)
            == f"model of iteration {iteration} failed: ZeroDivisionError: the fuse has blown"
        )


@pytest.mark.parametrize(
    ("bound", "iteration"),
    slow_but([(0, 3), (2, 7)], [(0, 0), (0, 3), (2, 0), (2, 7), (2, 11)]),
)
def test_an_error_in_the_model_costs_one_output(bound: int, iteration: int) -> None:
    run(3, fail_in_the_model, bound, iteration)


def fail_in_the_iterator(rank: int, iteration: int) -> None:
    batches = [make_batch(rank, step) for step in range(12)]
    expected = one_by_one(make_dlrm(sharder(1)), batches)

    class Source:
        """An iterator that goes on after an error, as that of a queue does."""

        def __init__(self) -> None:
            self.taken = 0

        def __iter__(self) -> "Source":
            return self

        def __next__(self) -> Batch:
            if self.taken == 12:
                raise StopIteration
            self.taken += 1
            if rank == 1 and self.taken - 1 == iteration:
                raise OSError("no such shard of the data")
            return batches[self.taken - 1]

    pipeline = BoundedLagPipeline[Batch, Any](make_dlrm(sharder(1)))
    answers = outcomes(pipeline, Source())
    failures = [answer for answer in answers if isinstance(answer, PipelineError)]
    assert len(failures) == (rank == 1)
    for error in failures:
        assert str(error) == (
            f"loading of iteration {iteration} failed: OSError: no such shard of the data"
        )
        assert isinstance(error.__cause__, OSError)
        del expected[iteration]
    outputs = [answer for answer in answers if not isinstance(answer, PipelineError)]
    for output, wanted in zip(outputs, expected, strict=True):
        models.assert_same_bits(output, wanted)


@pytest.mark.parametrize("iteration", slow_but([5], [0, 5]))
def test_an_error_in_the_iterator_costs_one_batch(iteration: int) -> None:
    run(3, fail_in_the_iterator, iteration)


def fail_in_the_input(rank: int, bound: int) -> None:
    batches = [make_batch(rank, step) for step in range(10)]
    expected = one_by_one(make_dlrm(sharder(bound)), batches)
    bad = {0, 3, 4} if rank == 1 else {9} if rank == 2 else set()
    for iteration in bad:
        batches[iteration].sparse_features.values()[0] = 10**6
    if rank == 1:
        batches[4] = Batch(batches[3].dense_features, None, batches[3].labels)  # type: ignore[arg-type]
    pipeline = BoundedLagPipeline[Batch, Any](make_dlrm(sharder(bound)))
    answers = outcomes(pipeline, iter(batches))
    assert_only_failed(answers, expected, bad)
    for iteration in bad - {4}:
        error = answers[iteration]
        assert isinstance(error, BadBatchError) and isinstance(error, ValueError)
        assert re.match(
            rf"iteration {iteration}: .* on rank {rank}: id 1000000 at position 0 of feature 'f",
            str(error),
        )


@pytest.mark.parametrize("bound", slow_but([2], [0, 2]))
def test_a_batch_that_does_not_fit_is_its_senders_problem(bound: int) -> None:
    run(3, fail_in_the_input, bound)


class TwoCalls(nn.Module):
    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, batch: Batch) -> torch.Tensor:
        first = self.embeddings(batch.sparse_features).values()
        return first + self.embeddings(batch.sparse_features).values()


class ChangedInput(TwoCalls):
    def forward(self, batch: Batch) -> torch.Tensor:
        return self.embeddings(batch.sparse_features.permute([4, 3, 2, 1, 0])).values()


class UnusedEmbeddings(TwoCalls):
    """Does not wait for its embeddings."""

    def forward(self, batch: Batch) -> torch.Tensor:
        self.embeddings(batch.sparse_features)
        return batch.labels


def sharded_in(model: type[nn.Module], bound: int = 1) -> nn.Module:
    module = models.EBC.module()
    plan = models.make_plan(module, ["table_wise"] * models.EBC.tables, sharder(bound))
    return models.shard_model(model(module), {"embeddings": plan}, [sharder(bound)])


def pipe_odd_models(rank: int) -> None:
    def batches() -> Iterator[Batch]:
        return iter([make_batch(rank, step) for step in range(5)])

    with pytest.raises(
        ValueError, match=r"\['model.sparse_arch.embedding_bag_collection'\] were sharded by others"
    ):
        BoundedLagPipeline(make_dlrm(EmbeddingBagCollectionSharder()))
    with pytest.raises(ValueError, match="no sharded module: give BLSEmbeddingCollectionSharder"):
        BoundedLagPipeline(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="the model changes it before the embedding module"):
        BoundedLagPipeline[Batch, Any](sharded_in(ChangedInput))
    labels = [batch.labels for batch in batches()]
    outputs = drain(BoundedLagPipeline[Batch, Any](sharded_in(UnusedEmbeddings)), batches())
    assert all(torch.equal(*pair) for pair in zip(outputs, labels, strict=True))


def test_models_that_cannot_be_piped_are_refused_by_name() -> None:
    run(2, pipe_odd_models)


def call_twice(rank: int) -> str:
    model = sharded_in(TwoCalls, bound=0)
    with pytest.raises(ValueError) as raised:
        BoundedLagPipeline[Batch, Any](model)
    assert model(make_batch(rank, 0)).shape  # it is as it was
    return str(raised.value)


def test_a_model_that_calls_an_embedding_module_twice_is_refused() -> None:
    for message in run(2, call_twice):
        assert "the model calls ['embeddings'] more than once in a forward" in message


def test_the_pipeline_is_one_of_torchrecs() -> None:
    assert issubclass(BoundedLagPipeline, TrainPipeline)

"""Training whose ranks have unequal numbers of batches, in TorchRec's pipelines and in a loop."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torchrec.datasets.utils import Batch

from tests.distributed import models
from tests.distributed.pipeline.test_torchrec_pipelines import (
    KINDS,
    PIPELINES,
    Model,
    batches,
    make_pipeline,
    outputs_of,
    sharded,
)
from tests.distributed.results.test_training import state_of
from tests.processes import run, run_outcomes
from tests.tiers import slow_but
from torchrec_bls import BLSConfig, EndTogether
from torchrec_bls.errors import BatchRefusedError

CONFIG = BLSConfig(deadline=50)
LOOP = "a loop"
TRAINING = [*(name for name in PIPELINES if name.startswith("Train")), LOOP]
Results = tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        kind: embedding module.
        pipeline: how batches are trained.
        epochs: numbers of batches of each rank, in each epoch.
        lookahead: of EndTogether.
    """

    kind: str
    pipeline: str
    epochs: list[list[int]]
    lookahead: int = 4


class Loader:
    """Has another number of batches in each epoch."""

    def __init__(self, kind: models.Kind, rank: int, counts: list[int]) -> None:
        self._kind, self._rank, self._counts = kind, rank, iter(counts)

    def __iter__(self) -> Iterator[Batch]:
        return batches(self._kind, self._rank, next(self._counts))


def train(job: Job, rank: int, loader: Iterable[Batch]) -> Results:
    kind = KINDS[job.kind]
    model = sharded(kind, "mixed", kind.bls_sharder(CONFIG, models.SGD))
    outputs: list[dict[str, torch.Tensor]] = []
    if job.pipeline == LOOP:
        optimizer = torch.optim.SGD(model.module.head.parameters(), lr=0.01)
        for _ in job.epochs:
            for batch in loader:
                optimizer.zero_grad()
                loss, output = model(batch)
                loss.backward()
                optimizer.step()
                outputs.append(models.flatten(output))
    else:
        for _ in job.epochs:
            outputs += outputs_of(make_pipeline(job.pipeline, model), iter(loader))
    head = {name: p.detach().clone() for name, p in model.module.head.named_parameters()}
    return outputs, state_of(model) | head


def compare_with_equal_ends(rank: int, jobs: list[Job]) -> None:
    for job in jobs:
        kind, fewest = KINDS[job.kind], [min(counts) for counts in job.epochs]
        expected, expected_state = train(job, rank, Loader(kind, rank, fewest))
        own = Loader(kind, rank, [counts[rank] for counts in job.epochs])
        together = EndTogether(own, lookahead=job.lookahead)
        outputs, state = train(job, rank, together)
        assert len(outputs) == len(expected) == sum(fewest), job
        for output, wanted in zip(outputs, expected, strict=True):
            models.assert_same_bits(output, wanted)
        models.assert_same_bits(state, expected_state)


JOBS = [
    Job("ec", "TrainPipelineSparseDist", [[5, 3], [0, 2], [4, 9]]),
    Job("ebc", "TrainPipelineSparseDist", [[1, 6]], lookahead=1),
    Job("ebc", "TrainPipelineBase", [[8, 4], [4, 4]]),
    Job("ec", LOOP, [[3, 1], [9, 8]], lookahead=2),
]


def test_results_are_those_of_equal_ends() -> None:
    run(2, compare_with_equal_ends, JOBS, deadline=200)


@settings(
    max_examples=3,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # each example starts processes
)
@given(st.data(), st.sampled_from([2, 3]))
@pytest.mark.slow
def test_any_numbers_of_batches(data: st.DataObject, ranks: int) -> None:
    counts = st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks)
    jobs = st.builds(
        Job,
        kind=st.sampled_from(["ec", "ebc"]),
        pipeline=st.sampled_from(TRAINING),
        epochs=st.lists(counts, min_size=1, max_size=3),
        lookahead=st.integers(1, 5),
    )
    run(
        ranks,
        compare_with_equal_ends,
        data.draw(st.lists(jobs, min_size=4, max_size=4)),
        deadline=300,
    )


class TwoModules(nn.Module):
    """An EmbeddingCollection and an EmbeddingBagCollection, both on the ids of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Model(models.EC.module())
        self.bags = Model(models.EBC.module())

    def forward(self, batch: Batch) -> tuple[torch.Tensor, Any]:
        (first, embeddings), (second, _) = self.rows(batch), self.bags(batch)
        return first + second, embeddings


def train_two_modules(rank: int) -> None:
    results = []
    for equal in (True, False):
        model = TwoModules()
        sharders = [models.EC.bls_sharder(CONFIG), models.EBC.bls_sharder(CONFIG)]
        plans = {
            f"{name}.embeddings": models.make_plan(
                getattr(model, name).embeddings, models.sharding_types(kind, "mixed", 1), sharder
            )
            for name, kind, sharder in zip(
                ("rows", "bags"), (models.EC, models.EBC), sharders, strict=True
            )
        }
        trained = models.shard_model(model, plans, sharders)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        pipeline = PIPELINES["TrainPipelineSparseDist"](trained, optimizer, models.CPU)
        data: Iterable[Batch] = batches(models.EC, rank, 3 if equal else 3 + 2 * rank)
        outputs = outputs_of(pipeline, iter(data if equal else EndTogether(data)))
        results.append((outputs, state_of(trained)))
    (expected, expected_state), (outputs, state) = results
    assert len(outputs) == len(expected) == 3
    for output, wanted in zip(outputs, expected, strict=True):
        models.assert_same_bits(output, wanted)
    models.assert_same_bits(state, expected_state)


def test_several_sharded_modules_end_together() -> None:
    run(2, train_two_modules)


def refuse_a_batch(rank: int) -> None:
    kind = models.EC

    def data(count: int) -> Iterator[Batch]:
        for step, batch in enumerate(batches(kind, rank, count)):
            if rank == 1 and step == 2:
                batch.sparse_features.values()[0] = 10_000
            yield batch

    results = []
    for loader in (data(6), EndTogether(data(6 + 3 * rank), lookahead=2)):
        model = sharded(kind, "mixed", kind.bls_sharder(CONFIG))
        refused = steps = 0
        for batch in loader:
            steps += 1
            try:
                model(batch)[0].backward()
            except (ValueError, BatchRefusedError):
                refused += 1
        assert (steps, refused) == (6, 1)
        results.append(state_of(model))
    models.assert_same_bits(*results)


def test_a_refused_batch_is_one_of_those_agreed_on() -> None:
    run(2, refuse_a_batch)


def read_numbers(rank: int) -> None:
    """No model takes part: the ends are those of the data alone."""

    def failing(count: int) -> Iterator[int]:
        yield from range(count)
        raise OSError("disk")

    numbers = EndTogether([*range(5 + rank)], lookahead=3)
    for _ in range(2):
        assert list(numbers) == [*range(5)]
    at_end = iter(numbers)
    assert [next(at_end, None) for _ in range(7)] == [*range(5), None, None]
    numbers.close()
    # A loader that raises does so on its rank, and ends the others before the batch.
    broken = iter(EndTogether(failing(4) if rank == 0 else range(9), lookahead=3))
    assert [next(broken) for _ in range(4)] == [*range(4)]
    with pytest.raises(OSError if rank == 0 else StopIteration):
        next(broken)
    # But not where another rank has ended before.
    assert list(EndTogether(failing(4) if rank == 0 else range(3), lookahead=9)) == [*range(3)]
    assert list(EndTogether([], lookahead=1)) == []
    one = dist.new_group([rank])  # a rank alone has all of its own
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    assert one is not None and list(EndTogether(range(rank + 4), group=alone)) == [*range(rank + 4)]


def test_numbers_without_a_model() -> None:
    run(3, read_numbers)


def go_different_ways(rank: int, lookaheads: list[int]) -> None:
    numbers = EndTogether(range(9), lookahead=lookaheads[rank])
    data = iter(numbers)
    next(data)
    if rank == 1:
        data = iter(numbers)
    list(data)


@pytest.mark.parametrize("lookaheads", [[2, 2], [2, 3]])
def test_ranks_that_go_different_ways_are_named(lookaheads: list[int]) -> None:
    for outcome in run_outcomes(2, go_different_ways, lookaheads):
        assert outcome.error in ("ProtocolError", "PoisonedError"), outcome
        assert "rank 1 asks about epoch" in str(outcome) or "rank 0 asks about" in str(outcome)


@pytest.mark.parametrize("lookahead", [0, -1, 2.0, True])
def test_lookaheads_that_are_none(lookahead: Any) -> None:
    with pytest.raises(ValueError, match="but must be a positive number"):
        EndTogether([], lookahead=lookahead)
    with pytest.raises(ValueError, match="init_process_group"):
        EndTogether([])


def end_alone(rank: int, kind: str, name: str, lives_on: bool) -> None:
    module = KINDS[kind]
    model = sharded(module, "mixed", module.bls_sharder(BLSConfig(deadline=4)))
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    try:
        outputs_of(make_pipeline(name, model), batches(module, rank, 3 if rank == 1 else 6))
    finally:
        if lives_on and rank == 1:
            store.wait(["told"])
        store.set("told", "")


@pytest.mark.parametrize(
    ("ranks", "kind", "name", "lives_on"),
    slow_but(
        [(2, "ec", "TrainPipelineSparseDist", False), (2, "ebc", "TrainPipelineBase", True)],
        [
            (ranks, kind, name, lives_on)
            for ranks in (2, 3)
            for kind in ("ec", "ebc")
            for name in ("TrainPipelineSparseDist", "TrainPipelineBase")
            for lives_on in (False, True)
        ],
    ),
)
def test_without_an_agreement_the_others_name_the_rank_that_ended(
    ranks: int, kind: str, name: str, lives_on: bool
) -> None:
    outcomes = run_outcomes(ranks, end_alone, kind, name, lives_on)
    for rank in {*range(ranks)} - {1}:
        text = str(outcomes[rank])
        assert "rank 1" in text, text
        assert "torchrec_bls.EndTogether ends all ranks together" in text
    waited = [str(outcome) for outcome in outcomes if outcome.error == "PeerTimeoutError"]
    assert bool(waited) == lives_on
    assert all("rank 1 did not send within 4" in text for text in waited)

"""Ranks of a pipeline may run out of batches at different times, or have none for a while."""

from collections.abc import Iterator
from typing import Any

import pytest
from torchrec.datasets.utils import Batch

from tests.distributed.dlrm import make_batch, make_dlrm
from tests.distributed.models import assert_same_bits
from tests.distributed.pipeline.test_pipeline import flat, one_by_one, sharder
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import BoundedLagPipeline
from torchrec_bls.errors import BadBatchError


def end_at_different_times(rank: int, bound: int, epochs: list[list[int]]) -> None:
    batches = [make_batch(rank, step) for step in range(12)]
    expected = one_by_one(make_dlrm(sharder(bound)), batches)
    pipeline = BoundedLagPipeline[Batch, Any](make_dlrm(sharder(bound)))
    for counts in epochs:
        source = iter(batches[: counts[rank]])
        outputs = []
        with pytest.raises(StopIteration):
            while True:
                outputs.append(flat(pipeline.progress(source)))
        for output, wanted in zip(outputs, expected[: counts[rank]], strict=True):
            assert_same_bits(output, wanted)
    assert pipeline.detach() is not None


@pytest.mark.parametrize("bound", slow_but([3], [0, 1, 3]))
def test_each_rank_gets_all_its_outputs_however_many_the_others_have(bound: int) -> None:
    epochs = [[5, 3, 0], [0, 0, 0], [0, 12, 1], [2, 2, 9], [4, 4, 4]]
    run(3, end_at_different_times, bound, epochs)


def have_smaller_bounds(rank: int) -> None:
    # How far a rank is ahead when it learns of the end depends on its own bound.
    batches = [make_batch(rank, step) for step in range(6)]
    expected = one_by_one(make_dlrm(sharder(3)), batches)
    pipeline = BoundedLagPipeline[Batch, Any](make_dlrm(sharder(3)), bound=[0, 3, 1][rank])
    for count in (6 - rank, 2 * rank):
        source = iter(batches[:count])
        outputs = []
        with pytest.raises(StopIteration):
            while True:
                outputs.append(flat(pipeline.progress(source)))
        for output, wanted in zip(outputs, expected[:count], strict=True):
            assert_same_bits(output, wanted)


def test_ranks_may_have_different_bounds_in_their_pipelines() -> None:
    run(3, have_smaller_bounds)


def rest_at_times(rank: int, bound: int) -> None:
    batches = [make_batch(rank, step) for step in range(8)]
    expected = iter(one_by_one(make_dlrm(sharder(bound)), batches))
    # None: nothing at the moment. One rank begins with it, and never had a batch by then.
    given = [None if (step + rank) % 3 == 0 else batch for step, batch in enumerate(batches)]
    pipeline = BoundedLagPipeline[Batch, Any](make_dlrm(sharder(bound)))
    source: Iterator[Batch | None] = iter(given)
    for batch in given:
        output = pipeline.progress(source)
        wanted = next(expected)
        if batch is None:
            assert output is None
        else:
            assert_same_bits(flat(output), wanted)
    with pytest.raises(StopIteration):
        pipeline.progress(source)


@pytest.mark.parametrize("bound", slow_but([2], [0, 2]))
def test_a_rank_without_a_batch_at_the_moment_takes_part_and_gets_none(bound: int) -> None:
    run(3, rest_at_times, bound)


def drain_and_go_on(rank: int) -> None:
    batches = [make_batch(rank, step) for step in range(10)]
    expected = one_by_one(make_dlrm(sharder(2)), batches)
    batches[2].sparse_features.values()[0] = -1
    pipeline = BoundedLagPipeline[Batch, Any](make_dlrm(sharder(2)))
    assert pipeline.drain() == []
    source = iter(batches)
    first = flat(pipeline.progress(source))
    assert_same_bits(first, expected[0])
    answers = pipeline.drain()
    assert len(answers) == 4 and isinstance(answers[1], BadBatchError)
    for number in (0, 2, 3):
        assert_same_bits(flat(answers[number]), expected[number + 1])
    # The iterator goes on where it stood.
    for wanted in expected[5:]:
        assert_same_bits(flat(pipeline.progress(source)), wanted)
    with pytest.raises(StopIteration):
        pipeline.progress(source)


def test_drain_returns_what_is_under_way_and_leaves_the_iterator() -> None:
    run(2, drain_and_go_on)

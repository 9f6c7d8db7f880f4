"""Weights switched while requests flow: every output is of one version, and none is lost."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.datasets.utils import Batch

from tests.distributed.dlrm import make_batch, make_dlrm
from tests.distributed.models import local_shards
from tests.distributed.pipeline.test_pipeline import sharder
from tests.processes import run, run_outcomes
from tests.tiers import slow_but
from torchrec_bls import BoundedLagPipeline


def set_version(model: nn.Module, version: int) -> None:
    """Gives all weights on this rank, of tables and of layers, values of the version."""
    generator = torch.Generator().manual_seed(version)
    shift = torch.rand(1, generator=generator)
    with torch.no_grad():
        for _, _, shard in local_shards(model).values():
            shard.copy_(torch.sin(torch.arange(shard.numel()) * (1 + shift)).view_as(shard))
        for parameter in model.parameters():
            if not hasattr(parameter, "local_shards"):
                values = torch.cos(torch.arange(parameter.numel()) * (2 + shift))
                parameter.copy_(values.view_as(parameter) / 4)


def switch_under_load(
    rank: int, bound: int, batches: int, every: int, unequal: bool
) -> list[tuple[int, int]]:
    kinds = [make_batch(rank, step) for step in range(5)]
    reference = make_dlrm(sharder(0))
    versions = batches // every + 1
    expected = []
    for version in range(versions):
        set_version(reference, version)
        with torch.no_grad():
            expected.append([reference(batch) for batch in kinds])
    model = make_dlrm(sharder(bound))
    set_version(model, 0)
    pipeline = BoundedLagPipeline[Batch, torch.Tensor](model)
    own = batches - 7 * rank if unequal else batches
    source = iter([kinds[step % 5] for step in range(own)])
    draw = random.Random(rank)
    seen = []
    offered = 0
    for number in range(own):
        # Each rank has the next version ready at a time of its own.
        if offered < versions - 1 and number >= (offered + 1) * every - draw.randrange(every // 2):
            offered += 1
            pipeline.update(lambda version=offered: set_version(model, version))  # type: ignore[misc]
        output = pipeline.progress(source)
        of = [v for v in range(versions) if torch.equal(output, expected[v][number % 5])]
        assert len(of) == 1, f"output {number} is of the versions {of}"
        seen.append((number, of[0]))
    with pytest.raises(StopIteration):
        pipeline.progress(source)
    return seen


@pytest.mark.parametrize(
    ("bound", "unequal"), slow_but([(2, True)], [(0, False), (1, False), (3, False), (2, True)])
)
def test_every_output_is_of_one_version_and_versions_switch_at_one_batch(
    bound: int, unequal: bool
) -> None:
    by_rank = run(3, switch_under_load, bound, 60, 10, unequal)
    longest = dict(max(by_rank, key=len))
    for seen in by_rank:
        assert [version for _, version in seen] == sorted(version for _, version in seen)
        assert all(longest[number] == version for number, version in seen)
    assert max(longest.values()) >= 4


def fail_in_an_update(rank: int) -> None:
    pipeline = BoundedLagPipeline[Batch, Any](make_dlrm(sharder(1)))
    batches: Iterator[Batch] = iter([make_batch(rank, step) for step in range(12)])

    def function() -> None:
        if rank == 1:
            raise OSError("no such checkpoint")

    for step in range(12):
        if step == 3:
            pipeline.update(function)
        pipeline.progress(batches)


def test_an_update_that_fails_on_one_rank_fails_all() -> None:
    outcomes = run_outcomes(3, fail_in_an_update)
    assert outcomes[1].error == "RankFailedError"
    assert "OSError: no such checkpoint" in outcomes[1].message
    for rank in (0, 2):
        assert outcomes[rank].error == "PoisonedError"
        assert "rank 1" in outcomes[rank].message
        assert "OSError: no such checkpoint" in outcomes[rank].message

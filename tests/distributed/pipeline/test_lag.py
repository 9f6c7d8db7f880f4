"""Ranks are up to `bound` iterations apart, and never more."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torchrec.datasets.utils import Batch

from tests.distributed.dlrm import make_batch, make_dlrm
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BoundedLagPipeline,
    bounded_lag_modules,
)

STEPS = 24
PAUSE = 12
PATIENCE = 20.0
# Long enough for ranks that don't keep the bound to take the further steps that they could.
OBSERVED = 0.2


def key(rank: int) -> str:
    return f"steps done by rank {rank}"


def run_with_a_pause(rank: int, bound: int) -> tuple[list[int], dict[str, list[int]]]:
    """Rank 0 pauses before it posts batch `PAUSE` until the others have gone as far as they can.

    Returns:
        On rank 0, the steps that the others had done at the end of the pause; and the lag
        histograms of all channels of this rank.
    """
    store = dist.group.WORLD.get_group_store()
    others = range(1, dist.get_world_size())
    steps_done: list[int] = []

    def pause() -> None:
        end = time.monotonic() + PATIENCE
        while min(store.add(key(r), 0) for r in others) < PAUSE + bound:
            assert time.monotonic() < end, "the other ranks did not get `bound` steps ahead"
            time.sleep(0.01)
        time.sleep(OBSERVED)
        steps_done.extend(store.add(key(r), 0) for r in others)

    def load() -> Iterator[Batch]:
        for step in range(STEPS):
            if rank == 0 and step == PAUSE:
                pause()
            # Loading a batch is the start of a step and the end of the one before it.
            store.set(key(rank), str(step))
            yield make_batch(rank, step)

    model = make_dlrm(BLSEmbeddingBagCollectionSharder(config=BLSConfig(bound=bound, deadline=30)))
    pipeline = BoundedLagPipeline[Batch, Any](model)
    batches = load()
    for _ in range(STEPS):
        pipeline.progress(batches)
    histograms = {
        channel.name: channel.stats().lag_histogram
        for module in bounded_lag_modules(model).values()
        for channel in module.channels().values()
    }
    return steps_done, histograms


@pytest.mark.parametrize("bound", slow_but([0, 2], [0, 1, 2, 4]))
def test_ranks_go_as_far_ahead_of_a_late_one_as_the_bound_says(bound: int) -> None:
    (steps_done, _), *others = run(3, run_with_a_pause, bound, deadline=60)
    # Rank 0 has done the steps before PAUSE; the others have done `bound` more and are in the next.
    assert steps_done == [PAUSE + bound] * 2
    for _, histograms in others:
        assert len(histograms) == 2 * 3
        assert {len(histogram) for histogram in histograms.values()} == {bound + 1}
        # It is in the first exchange of a step that they waited for rank 0 to go on.
        (waited_in,) = (name for name in histograms if name.endswith("table_wise.ids"))
        assert histograms[waited_in][bound] > 0

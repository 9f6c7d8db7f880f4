"""Once warm, a forward is one message to each peer in each direction, and no collective."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torchrec.distributed import DistributedModelParallel

from tests.distributed import models
from tests.distributed.dlrm import make_batch, make_dlrm
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BoundedLagPipeline,
    bounded_lag_modules,
)

KINDS = {kind.name: kind for kind in (models.EC, models.EBC, models.WEIGHTED)}
STEPS = 6


def collectives_in(work: Callable[[], Any]) -> list[str]:
    """Runs `work` and returns the c10d operations that the profiler saw in it."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        work()
    names = [event.name for event in seen.events()]
    return [name for name in names if name.startswith(("c10d::", "gloo:", "_c10d_functional"))]


def messages(model: DistributedModelParallel) -> dict[str, int]:
    return {
        channel.name: channel.stats().messages
        for module in bounded_lag_modules(model).values()
        for channel in module.channels().values()
    }


def sent_in(model: DistributedModelParallel, work: Callable[[], Any]) -> dict[str, int]:
    """Runs `work`, which may not call a collective, and returns the messages sent by channel."""
    before = messages(model)
    assert collectives_in(work) == []
    return {name: count - before[name] for name, count in messages(model).items()}


def run_forwards(rank: int, kind_name: str) -> None:
    kind = KINDS[kind_name]
    models.set_nodes(2)
    ids = models.make_ids(kind, rank, 4)
    batch = models.Batch(ids)

    def forward(model: DistributedModelParallel) -> None:
        with torch.no_grad():
            for _ in range(STEPS):
                models.arrived(model(batch))

    theirs = models.shard(kind, "mixed", kind.torchrec_sharder(), 2)
    forward(theirs)
    # Splits, lengths, values and embeddings of every sharding type, table-row-wise twice.
    types = set(models.sharding_types(kind, "mixed", 2))
    assert len(collectives_in(lambda: forward(theirs))) >= 4 * STEPS * len(types)

    model = models.shard(kind, "mixed", kind.bls_sharder(BLSConfig()), 2)
    forward(model)
    peers = torch.distributed.get_world_size() - 1
    expected = {f"embeddings.{t}.{way}" for t in types for way in ("ids", "embeddings")}
    assert sent_in(model, lambda: forward(model)) == dict.fromkeys(expected, STEPS * peers)


@pytest.mark.parametrize("kind", slow_but(["ec"], KINDS))
def test_a_forward_sends_one_message_per_peer_direction_and_sharding_type(kind: str) -> None:
    run(4, run_forwards, kind)


def run_training(rank: int, kind_name: str) -> None:
    kind = KINDS[kind_name]
    model = models.shard(kind, "mixed", kind.bls_sharder(BLSConfig()))
    batch = models.Batch(models.make_ids(kind, rank, 4))

    def train() -> None:
        for _ in range(STEPS):
            output = models.arrived(model(batch))
            values = output.values()
            tensors = [values] if isinstance(values, torch.Tensor) else [v.values() for v in values]
            sum(t.sum() for t in tensors).backward()

    train()
    sent = sent_in(model, train)
    assert {name.rpartition(".")[2] for name in sent} == {"ids", "embeddings", "gradients"}
    assert len(sent) == 3 * len(set(models.sharding_types(kind, "mixed", 1)))
    assert set(sent.values()) == {STEPS * (torch.distributed.get_world_size() - 1)}


@pytest.mark.parametrize("kind", slow_but(["weighted"], KINDS))
def test_a_training_step_sends_one_message_more_for_the_gradients(kind: str) -> None:
    run(3, run_training, kind)


def run_pipeline(rank: int) -> None:
    model = make_dlrm(BLSEmbeddingBagCollectionSharder(config=BLSConfig(bound=2)))
    pipeline = BoundedLagPipeline[Any, torch.Tensor](model)
    batches = iter([make_batch(rank, step) for step in range(30)])
    for _ in range(10):
        pipeline.progress(batches)
    sent = sent_in(model, lambda: [pipeline.progress(batches) for _ in range(STEPS)])
    assert len(sent) == 2 * 3
    assert set(sent.values()) == {STEPS * (torch.distributed.get_world_size() - 1)}


def test_a_dlrm_in_a_pipeline_sends_no_more() -> None:
    run(3, run_pipeline)

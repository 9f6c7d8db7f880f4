"""The memory that simulations count for slots is what channels of real ranks take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner.types import Topology
from torchrec_bls.sharding.calibration.configurations import TableConfiguration
from torchrec_bls.sharding.calibration.step_models import Collection, StepModel, plans_by_hand
from torchrec_bls.sharding.calibration.steps import Embeddings, batch_of
from torchrec_bls.sharding.problem.plan_groups import groups_of
from torchrec_bls.sharding.torchrec.plan import to_sharding_plan

from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BLSEmbeddingCollectionSharder,
    bounded_lag_channels,
)

RANKS, BATCH = 2, 600
MODEL = StepModel(
    "two collections",
    (
        Collection(True, tuple(TableConfiguration(500, dim, 4.0, 0.5) for dim in (16, 64))),
        Collection(False, (TableConfiguration(900, 32, 3.0, 0.2),)),
    ),
    BATCH,
    seed=5,
)


def ring_bytes(rank: int, way: str, bound: int, training: bool) -> int:
    job = MODEL.job(RANKS, RANKS, "bls", training=training)
    plan = plans_by_hand(MODEL.workload(RANKS), job)[way]
    topology = Topology(world_size=RANKS, local_world_size=RANKS, compute_device="cpu")
    config = BLSConfig(bound=bound)
    model = DistributedModelParallel(
        Embeddings(MODEL),
        device=torch.device("cpu"),
        plan=to_sharding_plan(plan, topology),
        sharders=[
            BLSEmbeddingBagCollectionSharder(config=config),
            BLSEmbeddingCollectionSharder(config=config),
        ],
    )
    with torch.set_grad_enabled(training):
        output = model.train(training)(batch_of(MODEL, rank, 0))
    if training:
        output.backward()
    return sum(channel.stats().ring_bytes for channel in bounded_lag_channels(model))


@pytest.mark.parametrize(
    ("way", "bound", "training"),
    slow_but(
        [("table_wise", 2, False)],
        [
            ("table_wise", 2, False),
            ("row_wise", 0, False),
            ("mixed", 4, False),
            ("row_wise", 0, True),
        ],
    ),
)
def test_slots(way: str, bound: int, training: bool) -> None:
    counted = run(RANKS, ring_bytes, way, bound, training)
    job = MODEL.job(RANKS, RANKS, "bls", training=training)
    job = replace(job, bound=bound)
    workload = MODEL.workload(RANKS)
    simulated = sum(
        group.slots() for group in groups_of(plans_by_hand(workload, job)[way], workload, job)
    )
    for of_rank in counted:
        assert simulated == pytest.approx(of_rank, rel=0.05)

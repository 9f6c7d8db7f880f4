"""Unmodified TorchRec over `cpu:bls` computes and trains as over gloo, bit for bit."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import models
from tests.distributed.results.test_training import loss_of
from tests.processes import run
from tests.tiers import slow_but

KINDS = {kind.name: kind for kind in (models.EC, models.EBC, models.WEIGHTED)}
SHARDINGS = ["table_wise", "row_wise", "column_wise", "mixed"]


def compute_and_train(rank: int, kind_name: str) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Returns for each sharding the outputs of every step and the weights after the last."""
    kind: models.Kind = KINDS[kind_name]
    results: dict[str, Any] = {}
    for sharding in SHARDINGS:
        model = models.shard(kind, sharding, kind.torchrec_sharder())
        assert type(model.module.embeddings).__module__.startswith("torchrec.")
        results[sharding] = []
        for step in range(4):
            ids = models.make_ids(kind, 100 * rank + step, 3 + step, most_ids=5)
            with torch.no_grad():
                results[sharding].append(models.flatten(model(models.Batch(ids))))
            output = models.arrived(model(models.Batch(ids)))
            loss_of(output).backward()
            results[sharding].append(models.flatten(output))
        weights = {
            name: tensor.clone() for name, (_, _, tensor) in models.local_shards(model).items()
        }
        results[sharding].append(weights)
    if dist.get_backend() == "cpu:bls":
        assert dist.group.WORLD.channel.stats().messages > 0
    return results


@pytest.mark.parametrize(
    ("world_size", "kind"), slow_but([(2, "weighted")], product((2, 4), KINDS))
)
def test_torchrec_computes_and_trains_as_over_gloo(world_size: int, kind: str) -> None:
    expected, found = (
        run(world_size, compute_and_train, kind, backend=backend, deadline=120)
        for backend in ("gloo", "cpu:bls")
    )
    for theirs, ours in zip(expected, found, strict=True):
        for sharding in SHARDINGS:
            for i, (a, b) in enumerate(zip(theirs[sharding], ours[sharding], strict=True)):
                assert a.keys() == b.keys()
                for name in a:
                    same = torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8))
                    assert same, (sharding, i, name)

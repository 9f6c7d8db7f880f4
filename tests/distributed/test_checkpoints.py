"""Checkpoints of bounded-lag modules are TorchRec's, for any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torchrec.distributed import DistributedModelParallel

from tests.distributed.models import (
    EBC,
    EC,
    Batch,
    Kind,
    arrived,
    assert_same_bits,
    flatten,
    make_ids,
    shard,
)
from tests.distributed.test_training import OPTIMIZERS, loss_of
from tests.processes import run
from torchrec_bls import BLSConfig

KINDS = {kind.name: kind for kind in (EC, EBC)}
SAMPLES = 4


def sharded(kind: Kind, sharding: str, ours: bool = True) -> DistributedModelParallel:
    fused = OPTIMIZERS["rowwise-adagrad"]
    config = BLSConfig(deadline=60)
    sharder = kind.bls_sharder(config, fused) if ours else kind.torchrec_sharder(fused)
    return shard(kind, sharding, sharder)


def state_dict_of(model: DistributedModelParallel) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


def forget(model: DistributedModelParallel) -> None:
    """Makes weights and optimizer states others than those of a checkpoint."""
    for tensor in model.fused_optimizer.params.values():
        for shard_ in tensor.local_shards():
            shard_.tensor.detach().fill_(7)
    for state in model.fused_optimizer.state_dict()["state"].values():
        for value in state.values():
            for shard_ in value.local_shards():
                shard_.tensor.fill_(7)


def outputs_of(model: DistributedModelParallel, kind: Kind, group: range) -> list[Any]:
    """Trains a step on the samples of the ranks of `group`; returns outputs by their seed."""
    found = []
    for seed in group:
        output = arrived(model(Batch(make_ids(kind, seed, SAMPLES))))
        loss_of(output).backward()
        found.append((seed, flatten(output)))
    return found


def save(rank: int, kind: Kind, sharding: str, folder: Path) -> list[Any]:
    model = sharded(kind, sharding)
    outputs_of(model, kind, range(rank, rank + 1))
    checkpoint.save(state_dict_of(model), checkpoint_id=folder)
    with torch.no_grad():
        return [flatten(model(Batch(make_ids(kind, 50, SAMPLES))))]


def load(rank: int, kind: Kind, sharding: str, folder: Path, ours: bool) -> list[Any]:
    model = sharded(kind, sharding, ours)
    forget(model)
    state = state_dict_of(model)
    checkpoint.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])
    with torch.no_grad():
        outputs = [flatten(model(Batch(make_ids(kind, 50, SAMPLES))))]
    # The next steps depend on the optimizer's states.
    for step in range(2):
        outputs += [out for _, out in outputs_of(model, kind, range(60 + step, 61 + step))]
    return outputs


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_by_four_ranks_and_loaded_by_two(kind: str, sharding: str, tmp_path: Path) -> None:
    of_kind = KINDS[kind]
    saved = run(4, save, of_kind, sharding, tmp_path, deadline=120)
    loaded = run(2, load, of_kind, sharding, tmp_path, True, deadline=120)
    torchrecs = run(2, load, of_kind, sharding, tmp_path, False, deadline=120)
    for rank, outputs in enumerate(loaded):
        assert_same_values(outputs[0], saved[0][0])
        for output, wanted in zip(outputs, torchrecs[rank], strict=True):
            assert_same_bits(output, wanted)

"""Checkpoints of bounded-lag modules are TorchRec's, and fit any number of ranks."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torchrec import KeyedTensor
from torchrec.distributed import DistributedModelParallel

from tests.distributed import models
from tests.distributed.results.test_training import OPTIMIZERS, state_of
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import BLSConfig

KINDS = {kind.name: kind for kind in (models.EC, models.EBC)}
SHARDINGS = ["table_wise", "row_wise"]


def sharded(kind: models.Kind, sharding: str, ours: bool = True) -> DistributedModelParallel:
    fused = OPTIMIZERS["rowwise-adagrad"]
    if ours:
        return models.shard(kind, sharding, kind.bls_sharder(BLSConfig(deadline=60), fused))
    return models.shard(kind, sharding, kind.torchrec_sharder(fused))


def outputs_of(
    model: DistributedModelParallel, kind: models.Kind, seeds: range
) -> list[dict[str, torch.Tensor]]:
    """Trains a step per seed and returns the embeddings by name: their order is that of ranks."""
    outputs = []
    for seed in seeds:
        output = models.arrived(model(models.Batch(models.make_ids(kind, seed, 4))))
        loss = sum((part.sin().sum() for part in parts_of(output).values()), torch.zeros(()))
        loss.backward()
        outputs.append({name: part.detach() for name, part in parts_of(output).items()})
    return outputs


def parts_of(output: Any) -> dict[str, torch.Tensor]:
    if isinstance(output, KeyedTensor):
        return dict(sorted(output.to_dict().items()))
    return {name: jagged.values() for name, jagged in sorted(output.items())}


def state_dict_of(model: DistributedModelParallel) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


def save(rank: int, kind: models.Kind, sharding: str, folder: Path) -> dict[str, torch.Tensor]:
    """Saves a model that has been trained, and returns its embeddings then."""
    model = sharded(kind, sharding)
    outputs_of(model, kind, range(10 + rank, 14 + rank))
    checkpoint.save(state_dict_of(model), checkpoint_id=folder)
    return outputs_of(model, kind, range(50, 51))[0]


def load(
    rank: int, kind: models.Kind, sharding: str, folder: Path, ours: bool
) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Goes on training, which depends on the optimizer's states; returns outputs and states."""
    model = sharded(kind, sharding, ours)
    fresh = state_of(model)
    state = state_dict_of(model)
    checkpoint.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])
    loaded = state_of(model)
    assert all(not torch.equal(loaded[name], fresh[name]) for name in fresh if "momentum" in name)
    return outputs_of(model, kind, range(50, 53)), state_of(model)


@pytest.mark.parametrize(
    ("kind", "sharding"),
    slow_but([("ec", "table_wise"), ("ebc", "row_wise")], product(KINDS, SHARDINGS)),
)
def test_saved_by_four_ranks_and_loaded_by_two(kind: str, sharding: str, tmp_path: Path) -> None:
    of_kind = KINDS[kind]
    saved = run(4, save, of_kind, sharding, tmp_path, deadline=120)
    ours, torchrecs = (
        run(2, load, of_kind, sharding, tmp_path, which, deadline=120) for which in (True, False)
    )
    for (outputs, state), (expected, expected_state) in zip(ours, torchrecs, strict=True):
        for name, part in outputs[0].items():
            # Sums over the rows of four ranks and of two differ by rounding.
            torch.testing.assert_close(part, saved[0][name], rtol=1e-5, atol=1e-6)
        for output, wanted in zip(outputs, expected, strict=True):
            models.assert_same_bits(output, wanted)
        models.assert_same_bits(state, expected_state)


def exchange_state_dicts(rank: int, kind: models.Kind) -> None:
    ours = sharded(kind, "mixed")
    outputs_of(ours, kind, range(10 + rank, 14 + rank))
    theirs = sharded(kind, "mixed", ours=False)
    theirs.load_state_dict(ours.state_dict())
    theirs.fused_optimizer.load_state_dict(ours.fused_optimizer.state_dict())
    back = sharded(kind, "mixed")
    back.load_state_dict(theirs.state_dict())
    back.fused_optimizer.load_state_dict(theirs.fused_optimizer.state_dict())
    models.assert_same_bits(state_of(theirs), state_of(ours))
    models.assert_same_bits(state_of(back), state_of(ours))
    expected = outputs_of(ours, kind, range(rank, rank + 3))
    for other in (theirs, back):
        for output, wanted in zip(
            outputs_of(other, kind, range(rank, rank + 3)), expected, strict=True
        ):
            models.assert_same_bits(output, wanted)


@pytest.mark.parametrize("kind", slow_but(["ec"], KINDS))
def test_state_dicts_go_to_torchrecs_modules_and_back(kind: str) -> None:
    run(2, exchange_state_dicts, KINDS[kind])

"""Forwards without a backward: all that they hold is freed, and the ranks stay in step."""

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed import models
from tests.distributed.results.rank_order import in_rank_order
from tests.distributed.results.test_training import loss_of, state_of
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import BLSConfig
from torchrec_bls.distributed.codec_config import CodecConfig
from torchrec_bls.errors import PeerTimeoutError, PoisonedError

KINDS = {kind.name: kind for kind in (models.EC, models.EBC, models.WEIGHTED)}
CONFIGS = {
    "plain": BLSConfig(),
    "codecs": BLSConfig(codecs=CodecConfig(forward="fp16", backward="fp16")),
    "unique": BLSConfig(codecs=CodecConfig(unique=True)),
}
SAMPLES = 4
NODES = 2
Step = Callable[[nn.Module, models.Batch], Any]


def live() -> Counter[str]:
    """Returns the numbers of tensors, and of objects of either package's classes, by type.

    A cycle that goes through nodes of autograd's graph is invisible to the garbage collector. The
    objects on it are not.
    """
    gc.collect()
    types = (type(each) for each in gc.get_objects())
    return Counter(
        f"{kind.__module__}.{kind.__name__}"
        for kind in types
        if issubclass(kind, torch.Tensor) or str(kind.__module__).startswith(("torchrec", "tests"))
    )


def outputs_of(model: nn.Module, batch: models.Batch) -> list[torch.Tensor]:
    """Returns the tensors of a forward, waited for."""
    output = models.arrived(model(batch))
    if isinstance(output, dict):
        return [jagged.values() for jagged in output.values()]
    return [output.values()]


def wait_for_all(model: nn.Module, batch: models.Batch) -> list[torch.Tensor]:
    outputs = outputs_of(model, batch)
    assert all(output.requires_grad for output in outputs)
    return outputs


def wait_for_nothing(model: nn.Module, batch: models.Batch) -> None:
    model(batch)


def train(model: nn.Module, batch: models.Batch) -> list[torch.Tensor]:
    outputs = outputs_of(model, batch)
    sum((each.sin().sum() for each in outputs), torch.zeros(())).backward()
    return outputs


def leave_out(model: nn.Module, batch: models.Batch) -> list[torch.Tensor]:
    """Trains with the first output alone: that of one sharding type in an EmbeddingCollection."""
    outputs = outputs_of(model, batch)
    outputs[0].sin().sum().backward()
    return outputs


def wait_twice(model: nn.Module, batch: models.Batch) -> list[torch.Tensor]:
    """Trains with an output that is asked for twice."""
    awaitable = model(batch)
    both = [awaitable.wait(), awaitable.wait()]
    loss_of(both[0]).add(loss_of(both[1])).backward()
    return [both[0].values()] if isinstance(both[0].values(), torch.Tensor) else []


STEPS = [wait_for_all, wait_for_nothing, wait_twice, leave_out, train]


def count_what_lives(rank: int, kind: models.Kind, config: BLSConfig) -> None:
    models.set_nodes(NODES)
    model = models.shard(kind, "mixed", kind.bls_sharder(config), NODES)

    def several(step: Step) -> list[Any]:
        """Returns references to ids and outputs of four batches."""
        kept = []
        for seed in range(4):
            batch = models.Batch(models.make_ids(kind, 10 * seed + rank, SAMPLES))
            outputs = step(model, batch)
            kept += map(weakref.ref, [batch.ids.values(), *(outputs or ())])
        wait_for_all(model, batch)  # the exchange of a batch that nobody waits for ends with it
        return kept

    for step in STEPS:
        several(step)
    before = live()
    for step in STEPS:
        kept = several(step)
        grown = live() - before
        assert not grown, f"{step.__name__}: {grown}"
        assert all(each() is None for each in kept), step.__name__


@pytest.mark.parametrize("config", slow_but(["plain", "codecs"], CONFIGS))
@pytest.mark.parametrize("kind", slow_but(["ec", "ebc"], KINDS))
def test_what_a_forward_holds_is_freed(kind: str, config: str) -> None:
    run(2, count_what_lives, KINDS[kind], CONFIGS[config])


def stay_in_step(rank: int, kind: models.Kind) -> None:
    """Skipped steps and partial losses change as much as in TorchRec's modules."""
    models.set_nodes(NODES)
    trained = []
    for sharder in (kind.torchrec_sharder(), kind.bls_sharder(BLSConfig())):
        model = models.shard(kind, "mixed", sharder, NODES)
        steps = [train, wait_for_all, leave_out, wait_for_all, wait_for_all, train, leave_out]
        with in_rank_order():
            for seed, step in enumerate(steps):
                step(model, models.Batch(models.make_ids(kind, 10 * seed + rank, SAMPLES)))
        trained.append(state_of(model))
    models.assert_same_bits(trained[1], trained[0])


@pytest.mark.parametrize("kind", slow_but(["ec", "ebc"], KINDS))
def test_training_goes_on_as_torchrecs(kind: str) -> None:
    run(2, stay_in_step, KINDS[kind])


def train_with_an_output_that_is_asked_for_twice(rank: int, kind: models.Kind) -> None:
    states = []
    for factor in (1, 2):
        model = models.shard(kind, "row_wise", kind.bls_sharder(BLSConfig()))
        output = model(models.Batch(models.make_ids(kind, rank, SAMPLES)))
        sum((loss_of(output.wait()) for _ in range(factor)), torch.zeros(())).mul(
            2 / factor
        ).backward()
        states.append(state_of(model))
    models.assert_same_bits(*states)


@pytest.mark.parametrize("kind", slow_but(["ec", "ebc"], KINDS))
def test_an_output_may_be_asked_for_twice(kind: str) -> None:
    """TorchRec's raises. Half of the gradient would be missing here."""
    run(2, train_with_an_output_that_is_asked_for_twice, KINDS[kind])


def leave_out_on_one_rank(rank: int) -> None:
    model = models.shard(models.EC, "mixed", models.EC.bls_sharder(BLSConfig(deadline=8)))
    batch = models.Batch(models.make_ids(models.EC, rank, SAMPLES))
    train(model, batch)
    with pytest.raises((PeerTimeoutError, PoisonedError), match="gradients"):
        (leave_out if rank else train)(model, batch)
        time.sleep(rank)  # rank 0 is in its wait for gradients, and gives up first
        train(model, batch)


def test_a_loss_that_leaves_features_out_on_one_rank_is_an_error_by_the_deadline() -> None:
    """TorchRec's waits as long as the process group does."""
    run(2, leave_out_on_one_rank)

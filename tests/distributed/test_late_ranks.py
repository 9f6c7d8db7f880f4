"""A rank whose first forward comes after the others gave up meets them at their next one."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedTensor
from torchrec.distributed.types import ShardingEnv

from tests.distributed import models
from tests.distributed.test_reshard import by_key
from tests.processes import run
from tests.quant import models as quant_models
from torchrec_bls import BLSConfig
from torchrec_bls.distributed.config import Deadline
from torchrec_bls.errors import RendezvousError

LATE = 1


def come(rank: int, forward: Any, deadline: Any) -> tuple[str, Any]:
    """Lets all ranks but one give up, then all of them come. Returns the error and the result."""
    message = ""
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    if rank == LATE:
        store.wait([f"{other} gave up" for other in (0, 2)])
    else:
        with deadline, pytest.raises(RendezvousError) as caught:
            forward()
        message = str(caught.value)
        store.set(f"{rank} gave up", "")
    return message, forward()


def short() -> Any:
    return mock.patch.object(Deadline, "seconds", 0.3)


def values_of(output: Any) -> dict[str, torch.Tensor]:
    output = models.arrived(output)
    return by_key(output) if isinstance(output, KeyedTensor) else models.flatten(output)


def check(ours: dict[str, torch.Tensor], unsharded: Any) -> None:
    theirs = values_of(unsharded)
    for name, values in ours.items():
        torch.testing.assert_close(values, theirs[name], rtol=1e-6, atol=1e-6)
    assert len(ours) == len(theirs)


def answer(rank: int, kind: models.Kind, lookup: str, bound: int) -> str:
    batches = [models.Batch(models.make_ids(kind, rank + 3 * i, 4)) for i in range(3)]
    unsharded = kind.module()
    model = models.shard(
        kind, "row_wise", kind.bls_sharder(BLSConfig(lookup=lookup, bound=bound, name="late one"))
    )
    with torch.no_grad():
        message, first = come(rank, lambda: values_of(model(batches[0])), short())
        answers = [first, *(values_of(model(batch)) for batch in batches[1:])]
        for batch, ours in zip(batches, answers, strict=True):
            check(ours, unsharded(batch.ids))
    dist.barrier()
    return message


@pytest.mark.parametrize(
    ("kind", "lookup", "bound"),
    [
        (models.EBC, "exchange", 0),
        (models.EC, "exchange", 2),
        (models.EC, "direct", 0),
        (models.EBC, "auto", 0),
    ],
)
def test_a_late_first_forward(kind: models.Kind, lookup: str, bound: int) -> None:
    messages = run(3, answer, kind, lookup, bound)
    for rank in (0, 2):
        assert "channel 'late one/embeddings plan' on rank" in messages[rank]
        assert "ranks [1] did not come to phase 'digest' within 0.3 s" in messages[rank]
        assert "BLSConfig(deadline=...)" in messages[rank]


def train(rank: int) -> None:
    kind = models.EC
    batch = models.Batch(models.make_ids(kind, rank, 4))
    model = models.shard(kind, "row_wise", kind.bls_sharder(BLSConfig()))

    def step() -> None:
        output = models.arrived(model(batch))
        torch.stack([each.values().sum() for each in output.values()]).sum().backward()

    come(rank, step, short())
    step()
    dist.barrier()


def test_a_late_first_step_of_training() -> None:
    run(3, train)


def answer_quantized(rank: int) -> None:
    types = ["int8", "int4", "int2", "fp16"]
    config = BLSConfig(lookup="exchange")
    model = quant_models.model_of("ebc", types)
    unsharded = quant_models.model_of("ebc", types)
    sharded = quant_models.shard(model, quant_models.sharder_of("ebc", config), "row_wise")
    batch = models.Batch(quant_models.make_ids("ebc", rank, 5))
    with torch.no_grad():
        _, first = come(rank, lambda: models.flatten(sharded(batch)), short())
        theirs = models.flatten(unsharded(batch))
        models.assert_same_bits(first, theirs)
        models.assert_same_bits(models.flatten(sharded(batch)), theirs)
    dist.barrier()


def test_a_late_first_forward_of_a_quantized_model() -> None:
    run(3, answer_quantized)


def shard_quantized(rank: int) -> str:
    types = ["int8", "int4", "int2", "fp16"]
    deadline = 60.0
    batch = models.Batch(quant_models.make_ids("ebc", rank, 5))
    unsharded = quant_models.model_of("ebc", types)

    def shard() -> Any:
        config = BLSConfig(lookup="direct", deadline=deadline)
        # Not by DistributedModelParallel, whose constructor waits for all ranks before.
        module = quant_models.model_of("ebc", types).embeddings
        sharder = quant_models.sharder_of("ebc", config)
        plan = quant_models.plan_of(module, sharder, "row_wise")
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        return sharder.shard(module, plan, env, torch.device("cpu"), "embeddings")

    class Short:
        def __enter__(self) -> None:
            nonlocal deadline
            deadline = 0.3

        def __exit__(self, *_: object) -> None:
            nonlocal deadline
            deadline = 60.0

    message, sharded = come(rank, shard, Short())
    with torch.no_grad():
        ours, theirs = models.flatten(sharded(batch.ids)), models.flatten(unsharded(batch))
        models.assert_same_bits(ours, theirs)
    dist.barrier()
    return message


def test_a_rank_that_shards_a_quantized_model_late() -> None:
    messages = run(3, shard_quantized)
    assert "ranks [1] did not come to phase 'possible'" in messages[0]


def fail_at_first(rank: int) -> str:
    """Rank 1's first forward fails by itself when the others wait for it. All come again."""
    kind = models.EBC
    batch = models.Batch(models.make_ids(kind, rank, 4))
    model = models.shard(kind, "row_wise", kind.bls_sharder(BLSConfig()))
    broken = mock.patch(
        "torchrec_bls.distributed.exchanges.exchange.wanted_slot_bytes",
        side_effect=KeyError("out of luck"),
    )
    with torch.no_grad():
        if rank == LATE:
            with broken, pytest.raises(KeyError) as own:
                model(batch)
            message = str(own.value)
        else:
            with pytest.raises(RendezvousError) as caught:
                model(batch)
            message = str(caught.value)
        ours = values_of(model(batch))
        check(ours, kind.module()(batch.ids))
    dist.barrier()
    return message


def test_a_first_forward_that_fails_is_heard_and_can_be_repeated() -> None:
    messages = run(3, fail_at_first)
    for rank in (0, 2):
        assert "rank 1 could not set it up" in messages[rank]
        assert "out of luck" in messages[rank]

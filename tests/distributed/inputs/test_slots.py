"""Slots have room for usual messages: those of a sample, or of the batches that came since."""

import warnings
from itertools import product
from typing import Any

import pytest
import torch
from torchrec.datasets.utils import Batch as DLRMBatch

from tests.distributed import models
from tests.distributed.dlrm import DENSE_FEATURES, make_batch, make_dlrm
from tests.distributed.pipeline.test_pipeline import flat, one_by_one, sharder
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import (
    BLSConfig,
    BoundedLagChannel,
    BoundedLagPipeline,
    bounded_lag_channels,
    bounded_lag_modules,
)
from torchrec_bls.collective import channel as channel_module
from torchrec_bls.errors import ChannelClosedError

KINDS = {kind.name: kind for kind in (models.EC, models.EBC, models.WEIGHTED)}
LARGE = 1500


def pulled(model: torch.nn.Module) -> int:
    return sum(channel.stats().pulled_messages for channel in bounded_lag_channels(model))


def is_closed(channel: BoundedLagChannel) -> bool:
    try:
        channel.native.ready()
    except ChannelClosedError:
        return True
    except ValueError:
        pass  # nothing is posted
    return False


def large_batch(rank: int, step: int, samples: int = LARGE) -> DLRMBatch:
    generator = torch.Generator().manual_seed(step)
    return DLRMBatch(
        dense_features=torch.rand(samples, DENSE_FEATURES, generator=generator),
        sparse_features=models.make_ids(models.EBC, 1000 * rank + step, samples),
        labels=torch.zeros(samples),
    )


def outgrow(rank: int, kind_name: str, bound: int) -> None:
    kind = KINDS[kind_name]
    model = models.shard(kind, "mixed", kind.bls_sharder(BLSConfig(bound=bound, deadline=60)))
    theirs = models.shard(kind, "mixed", kind.torchrec_sharder())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        models.arrived(model(models.Batch(models.make_ids(kind, rank, 1))))
        small = bounded_lag_channels(model)
        pulled_before = 0
        for step in range(30):
            # Only rank 1's batches are large: its ids are, and the embeddings for it.
            ids = models.make_ids(kind, 10 * step + rank, LARGE if rank == 1 else 2)
            models.assert_same_bits(
                models.flatten(model(models.Batch(ids))), models.flatten(theirs(models.Batch(ids)))
            )
            if step == 15:
                pulled_before = pulled(model)
        assert pulled(model) == pulled_before  # nothing is pulled for ever
        # Those that all have done with are closed, so that their memory is free.
        replaced = [channel for channel in small if channel not in bounded_lag_channels(model)]
        assert replaced and all(is_closed(channel) for channel in replaced)


@pytest.mark.parametrize(
    ("kind", "bound"), slow_but([("weighted", 2)], [("ec", 0), ("ebc", 0), ("weighted", 2)])
)
def test_messages_that_outgrow_their_slots_get_larger_ones(kind: str, bound: int) -> None:
    run(2, outgrow, kind, bound)


def outgrow_in_a_pipeline(rank: int, transport: str) -> int:
    config = {"transport": transport}
    batches = [
        large_batch(rank, step, samples=LARGE if step > 4 and rank != 1 else 3)
        for step in range(40)
    ]
    expected = one_by_one(make_dlrm(sharder(2)), batches)
    model = make_dlrm(sharder(2, **config))
    pipeline = BoundedLagPipeline[DLRMBatch, Any](model)
    source = iter(batches[: 40 - 3 * rank])
    for wanted in expected[: 40 - 3 * rank]:
        models.assert_same_bits(flat(pipeline.progress(source)), wanted)
    before = pulled(model)
    with pytest.raises(StopIteration):
        pipeline.progress(source)
    return before


@pytest.mark.parametrize("transport", slow_but(["shm"], ["shm", "tcp"]))
def test_slots_grow_while_ranks_are_apart(transport: str) -> None:
    run(3, outgrow_in_a_pipeline, transport, deadline=120)


def outgrow_in_training(rank: int) -> None:
    outputs = []
    for make in (models.EBC.bls_sharder(BLSConfig(deadline=60)), models.EBC.torchrec_sharder()):
        model = models.shard(models.EBC, "mixed", make)
        of_model = []
        for step in range(25):
            ids = models.make_ids(models.EBC, 10 * step + rank, 2 if step == 0 else LARGE)
            output = models.arrived(model(models.Batch(ids)))
            (output.values() ** 2).sum().backward()
            of_model.append(models.flatten(output))
        outputs.append(of_model)
        if make.__class__.__name__.startswith("BLS"):
            (module,) = bounded_lag_modules(model).values()
            for name, channel in module.channels().items():
                assert channel.stats().pulled_messages == 0, name
    for ours, theirs in zip(*outputs, strict=True):
        models.assert_same_bits(ours, theirs)


def test_slots_of_gradients_grow_too() -> None:
    run(2, outgrow_in_training)


def have_no_memory(rank: int) -> list[str]:
    model = models.shard(models.EC, "table_wise", models.EC.bls_sharder(BLSConfig(deadline=60)))
    theirs = models.shard(models.EC, "table_wise", models.EC.torchrec_sharder())
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        models.arrived(model(models.Batch(models.make_ids(models.EC, rank, 1))))
        if rank == 1:
            set_up = channel_module.set_up

            def refuse(*arguments: Any) -> Any:
                with arguments[0].own_part():
                    raise OSError("no space")
                return set_up(*arguments)

            channel_module.set_up = refuse  # type: ignore[assignment]
        for step in range(20):
            ids = models.make_ids(models.EC, 10 * step + rank, LARGE)
            models.assert_same_bits(
                models.flatten(model(models.Batch(ids))), models.flatten(theirs(models.Batch(ids)))
            )
    assert pulled(model) > 0
    return [str(w.message) for w in caught if "cannot be enlarged" in str(w.message)]


def test_without_memory_for_larger_slots_messages_are_pulled_as_before() -> None:
    said, others = run(2, have_no_memory, deadline=120)
    assert len(said) == 2  # of ids and of embeddings
    assert all("no space" in text for text in said)
    assert not others


def keep_given_slots(rank: int) -> None:
    model = models.shard(
        models.EBC, "table_wise", models.EBC.bls_sharder(BLSConfig(slot_bytes=1 << 14))
    )
    with torch.no_grad():
        models.arrived(model(models.Batch(models.make_ids(models.EBC, rank, 1))))
        channels = bounded_lag_channels(model)
        with pytest.warns(UserWarning, match="Set slot_bytes to at least .* or expected_batch to"):
            for step in range(20):
                models.arrived(model(models.Batch(models.make_ids(models.EBC, step, LARGE))))
        assert bounded_lag_channels(model) == channels and pulled(model) > 0


def test_slots_of_a_given_size_stay_so_with_a_warning() -> None:
    run(2, keep_given_slots)


def prepare(rank: int, kind_name: str, how: str) -> None:
    kind = KINDS[kind_name]
    expected = LARGE if how == "config" else None
    model = models.shard(kind, "mixed", kind.bls_sharder(BLSConfig(expected_batch=expected)))
    (module,) = bounded_lag_modules(model).values()
    sample = models.make_ids(kind, rank, 8)
    module.prepare(sample, largest_batch=LARGE if how == "argument" else None)
    channels = bounded_lag_channels(model)
    assert len(channels) == 2 * len(module._sharding_types)
    with torch.no_grad():
        for step in range(12):
            models.arrived(model(models.Batch(models.make_ids(kind, 10 * step + rank, LARGE))))
    assert pulled(model) == 0 and bounded_lag_channels(model) == channels
    with pytest.raises(ValueError, match="its channels are made already: say how large"):
        module.prepare(sample, largest_batch=5)


@pytest.mark.parametrize(
    ("kind", "how"),
    slow_but([("ec", "config"), ("weighted", "argument")], product(KINDS, ("argument", "config"))),
)
def test_prepared_modules_have_channels_for_their_largest_batch(kind: str, how: str) -> None:
    run(2, prepare, kind, how)


def prepare_a_pipeline(rank: int) -> None:
    expected = one_by_one(make_dlrm(sharder(1)), [large_batch(rank, step) for step in range(6)])
    model = make_dlrm(sharder(1))
    pipeline = BoundedLagPipeline[DLRMBatch, Any](model)
    pipeline.prepare(make_batch(rank, 0), largest_batch=LARGE)
    channels = bounded_lag_channels(model)
    assert channels
    source = iter([large_batch(rank, step) for step in range(6)])
    for wanted in expected:
        models.assert_same_bits(flat(pipeline.progress(source)), wanted)
    assert pulled(model) == 0 and bounded_lag_channels(model) == channels
    with pytest.raises(ValueError, match="prepare comes before the first batch"):
        pipeline.prepare(make_batch(rank, 0))


def test_prepared_pipelines_have_channels_for_their_largest_batch() -> None:
    run(2, prepare_a_pipeline)

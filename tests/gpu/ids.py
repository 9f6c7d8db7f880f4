"""Ids on the GPU that reads the tables, against lookups of the CPU.

    TRITON_INTERPRET=1 python -m tests.gpu.ids CHECK...

See sharded.py. A fake GPU hides ids and weights from the host outside of kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torchrec import KeyedJaggedTensor

from tests.direct import served
from tests.distributed import models
from tests.distributed.inputs.test_variable_batch import make_variable
from tests.distributed.test_direct_reads import outputs
from tests.gpu.sharded import (
    DIRECT,
    GPU,
    IS_FAKE,
    batches_of,
    beside,
    gpu_here,
    hide,
    make,
    sharded,
)
from tests.processes import run
from tests.quant import models as quant_models
from torchrec_bls import BLSConfig, bounded_lag_modules, publish
from torchrec_bls.direct.serving.served_model import ServedModel

BAD = 10**6


def on_gpu(batch: KeyedJaggedTensor, gpu: Any, hides: bool = True) -> KeyedJaggedTensor:
    return gpu.with_batch(batch, hides) if IS_FAKE else batch.to(GPU)


@contextmanager
def without_waits(gpu: Any) -> Iterator[None]:
    """A context in which the host does not wait for the GPU."""
    if IS_FAKE:
        with gpu.not_waited_for():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def give_the_bits(rank: int, kind: models.Kind, sharding: str) -> None:
    gpu = gpu_here()
    batches = batches_of(kind, rank)
    by_the_cpu = outputs(sharded(kind, sharding, models.CPU), *batches)
    by_gpu = sharded(kind, sharding, GPU)
    outputs(by_gpu, batches[0])  # the ranks meet, and kernels are compiled
    for batch, expected in zip(batches, by_the_cpu, strict=True):
        batch.length_per_key()  # which an EmbeddingCollection takes, and `to` keeps
        moved = on_gpu(batch, gpu)
        with without_waits(gpu), torch.no_grad():
            found = models.arrived(by_gpu(models.Batch(moved)))
        models.assert_same_bits(beside(models.flatten(found), gpu), expected)
    # The host has to ask for what it does not know.
    batch, expected = batches[1], by_the_cpu[1]
    bare = KeyedJaggedTensor(
        batch.keys(), batch.values().short(), batch.weights_or_none(), batch.lengths()
    )
    [found] = outputs(by_gpu, on_gpu(bare, gpu, hides=False))
    models.assert_same_bits(beside(found, gpu), expected)
    by_gpu.module.embeddings.wait_checked()
    # Batches of both kinds follow each other.
    hide(batch, gpu)
    models.assert_same_bits(beside(outputs(by_gpu, batch)[0], gpu), expected)


def bits_of_ids() -> None:
    for kind in (models.EC, models.EBC, models.WEIGHTED):
        run(2, give_the_bits, kind, "mixed", deadline=300)


def bits_of_ids_of_means_by_rows() -> None:
    run(2, give_the_bits, models.EBC, "row_wise", deadline=300)


def with_bad_id(feature: int, gpu: Any, seed: int = 1) -> tuple[KeyedJaggedTensor, int]:
    """Returns a batch with a bad id as the last one of a feature, and its place."""
    batch = models.make_ids(models.EBC, seed, 4)
    place = sum(batch.length_per_key()[: feature + 1]) - 1
    batch.values()[place] = BAD + feature
    return on_gpu(batch, gpu), place


def tell_late(rank: int) -> None:
    gpu = gpu_here()
    good = models.make_ids(models.EBC, 1, 4)
    model = sharded(models.EBC, "table_wise", GPU)
    module = model.module.embeddings
    [expected] = outputs(model, good)  # batch 1
    if rank == 1:  # the other rank's batches are not this one's
        models.assert_same_bits(outputs(model, on_gpu(good, gpu))[0], expected)
        module.wait_checked()
        assert module.refused_batches == 0
        return
    if IS_FAKE:
        gpu.cuda.is_busy = True
    bad, place = with_bad_id(2, gpu)
    [found] = outputs(model, bad)  # batch 2
    # NaN are the bags with the id, and nothing else.
    [values], [wanted] = found.values(), expected.values()
    is_nan = values.isnan()
    assert is_nan.any(0).sum() == models.DIMS[2] and is_nan.any(1).sum() == 1
    assert torch.equal(values[~is_nan], wanted[~is_nan])
    worse, _ = with_bad_id(4, gpu)
    if IS_FAKE:  # the GPU has not come to the report
        outputs(model, on_gpu(good, gpu), worse)  # batches 3 and 4
        assert module.refused_batches == 0
        gpu.cuda.is_busy = False
    else:
        outputs(model, on_gpu(good, gpu))
        torch.cuda.synchronize()
    message = (
        rf"batch 2, looked up in version '\(first forward\)': id {BAD + 2} of feature 'f2', at "
        rf"position {place} of all ids, is out of range: table 't2' has 57 rows, so ids go from 0 "
        r"to 56"
    )
    with pytest.raises(ValueError, match=message):
        outputs(model, good)
    assert module.refused_batches == 1
    if IS_FAKE:
        with pytest.raises(ValueError, match=rf"batch 4.*id {BAD + 4} of feature 'f4'"):
            outputs(model, on_gpu(good, gpu))
    models.assert_same_bits(outputs(model, on_gpu(good, gpu))[0], expected)
    # Whoever does not go on may wait for it, and is told once.
    if IS_FAKE:
        gpu.cuda.is_busy = True
    shared, _ = with_bad_id(0, gpu)
    outputs(model, shared)
    with pytest.raises(ValueError, match=rf"embeddings on rank 0.*: .* id {BAD}.*'t0' has 41"):
        module.wait_checked()
    module.wait_checked()
    # Lengths that take more ids than there are.
    batch = models.make_ids(models.EBC, 1, 4)
    batch.lengths()[-1] += 1
    outputs(model, on_gpu(batch, gpu))
    with pytest.raises(ValueError, match="the lengths of feature 'f4' do not fit the ids"):
        module.wait_checked()
    module.wait_checked()


def late_errors() -> None:
    run(2, tell_late, deadline=120)


def name_the_version(rank: int) -> None:
    gpu = gpu_here()
    model = served.sharded(DIRECT, GPU)
    batch = served.batches_of(rank, 1)[0]
    with torch.no_grad():
        model(batch)
        publish(model, served.weights_of(2), version="2").wait(30.0)
        batch.values()[0] = BAD
        moved = on_gpu(batch, gpu, hides=False)
        model(moved)
        for name, module in bounded_lag_modules(model).items():
            with pytest.raises(ValueError, match=rf"{name}.*batch 2, looked up in version '2'"):
                module.wait_checked()


def versions_of_late_errors() -> None:
    run(2, name_the_version, deadline=120)


def refuse(rank: int) -> None:
    gpu = gpu_here()
    kind, good = models.EBC, models.make_ids(models.EBC, 1, 4)
    model = sharded(kind, "mixed", GPU)
    [expected] = outputs(model, good)
    moved = on_gpu(good, gpu)
    if IS_FAKE:
        varying = make_variable(kind, rank, [1, 2, 3, 2, 4], 5)
        varying._values = gpu.with_batch(good).values()
        with pytest.raises(ValueError, match=r"batch size per key.*before it is moved"):
            outputs(model, varying)
    split = KeyedJaggedTensor(moved.keys(), moved.values(), lengths=good.lengths())
    with pytest.raises(ValueError, match=r"lengths are on cpu, but its ids are on the GPU"):
        outputs(model, split)
    with pytest.raises(ValueError, match=r"are on meta, but its ids are read on the CPU"):
        outputs(model, good.to(torch.device("meta")))
    floats = KeyedJaggedTensor(moved.keys(), moved.values().float(), lengths=moved.lengths())
    if IS_FAKE:
        gpu._own[floats.values().untyped_storage().data_ptr()] = (floats.values(),) * 2
    with pytest.raises(ValueError, match=r"values are torch.float32, not integers"):
        outputs(model, floats)
    missing = KeyedJaggedTensor(moved.keys()[:4], moved.values(), lengths=moved.lengths()[:16])
    with pytest.raises(ValueError, match=r"lacks the features \['f4'\]"):
        outputs(model, missing)
    models.assert_same_bits(outputs(model, moved)[0], expected)
    config = BLSConfig(lookup="direct", bad_ids="row0", deadline=30.0)
    replacing = models.shard(kind, "mixed", kind.bls_sharder(config), device=GPU)
    with pytest.raises(ValueError, match=r"not replaced \(bad_ids=\"row0\"\): give the batch on"):
        outputs(replacing, moved)
    # Lengths of an EmbeddingCollection that do not fit the ids are noticed by the host.
    rows = sharded(models.EC, "mixed", GPU)
    longer = models.make_ids(models.EC, 1, 4)
    longer.lengths()[0] += 1
    with pytest.raises(ValueError, match=r"malformed KeyedJaggedTensor: its lengths make"):
        outputs(rows, on_gpu(longer, gpu))


def give_the_bits_of_stored_rows(rank: int, kind: str, types: list[str], output: Any) -> None:
    gpu = gpu_here()
    model = quant_models.model_of(kind, types, output)
    unsharded = copy.deepcopy(model)
    by_gpu = quant_models.shard(model, quant_models.sharder_of(kind, DIRECT), "mixed", GPU)
    ids = quant_models.make_ids
    batches = [
        ids(kind, rank, 5),
        ids(kind, rank + 10, 3, dtype=torch.int32),
        ids(kind, rank + 20, 0),
        ids(kind, rank + 30, 2, most_ids=0),
    ]
    if rank == 1:  # in another order than that of the tables
        last = range(len(batches[0].keys()))[::-1]
        batches = [batch.permute(list(last)) for batch in batches]
    for batch in batches:
        [expected] = outputs(unsharded, batch)
        batch.length_per_key()  # which an EmbeddingCollection takes, and `to` keeps
        moved = on_gpu(batch, gpu)
        with without_waits(gpu), torch.no_grad():
            found = models.arrived(by_gpu(models.Batch(moved)))
        models.assert_same_bits(beside(models.flatten(found), gpu), expected)
    # Batches of both kinds follow each other.
    hide(batches[0], gpu)
    [expected] = outputs(unsharded, batches[0])
    models.assert_same_bits(beside(outputs(by_gpu, batches[0])[0], gpu), expected)
    # One of several types is told once, the first of the bad ids.
    bad = batches[0]
    places = [sum(bad.length_per_key()[: place + 1]) - 1 for place in (1, 3)]
    bad.values()[places] = BAD
    outputs(by_gpu, on_gpu(bad, gpu))
    module = by_gpu.module.embeddings
    with pytest.raises(
        ValueError, match=rf"id {BAD} of feature '{bad.keys()[1]}', at position {places[0]} "
    ):
        module.wait_checked()
    module.wait_checked()


def bits_of_ids_of_stored_rows() -> None:
    mixed = ["int8", "int4", "int2", "fp16"]
    for kind, types, output in (
        ("ebc", mixed, torch.float32),
        ("weighted", mixed, torch.float16),
        ("ec", [*mixed[:3], "fp32"], torch.float32),
    ):
        run(2, give_the_bits_of_stored_rows, kind, types, output, deadline=300)


def fail_at_a_launch(rank: int) -> None:
    gpu = gpu_here()
    model = sharded(models.EBC, "mixed", GPU)
    good = models.make_ids(models.EBC, rank, 4)
    [expected] = outputs(model, good)
    [reads] = ServedModel.of(model).reads
    reader: Any = reads._view.of(good.keys()).reader  # type: ignore[attr-defined]
    if rank == 0 and IS_FAKE:
        launch, error = reader._sum_bags, RuntimeError("CUDA error: an illegal memory access")
        for batch in (good, on_gpu(good, gpu)):
            with (
                mock.patch.object(reader, "_sum_bags", side_effect=error),
                pytest.raises(RuntimeError, match="illegal memory access"),
            ):
                outputs(model, batch)
        assert reader._sum_bags is launch
    # The other rank goes on, and so does this one, unless CUDA has failed for good.
    for batch in (good, on_gpu(good, gpu)):
        models.assert_same_bits(outputs(model, batch)[0], expected)
    model.module.embeddings.wait_checked()


def launches_that_fail() -> None:
    run(2, fail_at_a_launch, deadline=120)


def refusals_of_ids() -> None:
    run(2, refuse, deadline=120)


CHECKS = {
    check.__name__: check
    for check in (
        bits_of_ids,
        bits_of_ids_of_means_by_rows,
        late_errors,
        versions_of_late_errors,
        bits_of_ids_of_stored_rows,
        launches_that_fail,
        refusals_of_ids,
    )
}

if __name__ == "__main__":
    make(CHECKS)

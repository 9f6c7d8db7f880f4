"""Rows travel as they are stored, and outputs are the unsharded module's, bit for bit."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from tests.distributed.models import Batch, SparseOnly, assert_same_bits, flatten
from tests.processes import run
from tests.quant import models
from torchrec_bls import BLSConfig, BoundedLagPipeline

MIXED = ["int8", "int4", "int2", "fp16"]
EXCHANGE = BLSConfig(lookup="exchange", deadline=30.0)


def as_float(output: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns `output` with FP16 as it compares."""
    return {
        name: tensor.float() if tensor.dtype == torch.float16 else tensor
        for name, tensor in output.items()
    }


def assert_like(sharded: Any, unsharded: Any, ids: KeyedJaggedTensor) -> None:
    """Looks a batch up in both."""
    with torch.no_grad():
        ours, theirs = flatten(sharded(Batch(ids))), flatten(unsharded(Batch(ids)))
    assert_same_bits(as_float(ours), as_float(theirs))


def both(
    kind: str, types: Sequence[str], sharding: str, config: BLSConfig = EXCHANGE
) -> tuple[Any, Any]:
    """Returns a sharded model and the unsharded one."""
    model = models.model_of(kind, types)
    unsharded = copy.deepcopy(model)
    sharded = models.shard(model, models.sharder_of(kind, config), sharding)
    assert not sharded.module.embeddings.reads_directly
    return sharded, unsharded


def batches_of(kind: str, rank: int) -> list[KeyedJaggedTensor]:
    """Returns batches of all sorts; ranks differ in sizes, and in dtypes of ids."""
    of_rank = [torch.int32, torch.int64][rank % 2]
    return [
        models.make_ids(kind, 10 * rank, 5),
        models.make_ids(kind, 10 * rank + 1, 7 + rank, dtype=of_rank),
        models.make_ids(kind, 10 * rank + 2, 3 * (rank % 2)),
        models.make_ids(kind, 10 * rank + 3, 0),
        models.make_ids(kind, 10 * rank + 4, 3, most_ids=0),
        models.make_ids(kind, 10 * rank + 5, 200, most_ids=20),
    ]


@pytest.mark.parametrize("kind", models.KINDS)
def test_each_type(kind: str) -> None:
    run(2, _each_type, kind)


def _each_type(rank: int, kind: str) -> None:
    for types, sharding in [([name] * 4, "row_wise") for name in models.TYPES] + [
        (MIXED, "table_wise"),
        (MIXED[::-1], "mixed"),
    ]:
        sharded, unsharded = both(kind, types, sharding)
        for ids in batches_of(kind, rank):
            assert_like(sharded, unsharded, ids)


def test_three_ranks_and_slots_that_grow() -> None:
    run(3, _three_ranks)


def _three_ranks(rank: int) -> None:
    for kind in models.KINDS:
        for sharding in ("table_wise", "row_wise"):
            sharded, unsharded = both(kind, MIXED, sharding)
            for seed in range(12):  # those after the first do not fit its slots
                samples = 1 if seed == 0 else 300
                ids = models.make_ids(kind, 100 * rank + seed, samples, most_ids=9)
                assert_like(sharded, unsharded, ids)


def test_a_rank_that_is_never_asked() -> None:
    run(2, _never_asked)


def _never_asked(rank: int) -> None:
    # All tables are rank 0's.
    models.GENERATORS["one_rank"] = lambda table: models.table_wise(rank=0)
    sharded, unsharded = both("ebc", MIXED, "one_rank")
    for ids in batches_of("ebc", rank):
        assert_like(sharded, unsharded, ids)


def test_ids_in_the_output() -> None:
    run(2, _ids_in_the_output)


def _ids_in_the_output(rank: int) -> None:
    module = EmbeddingCollection(
        [
            EmbeddingConfig(
                num_embeddings=models.ROWS[table],
                embedding_dim=16,
                name=f"t{table}",
                feature_names=[models.FEATURES[table]],
            )
            for table in range(4)
        ],
        need_indices=True,
    )
    model = models.quantized(SparseOnly(module), MIXED)
    unsharded = copy.deepcopy(model)
    sharded = models.shard(model, models.sharder_of("ec", EXCHANGE), "row_wise")
    ids = models.make_ids("ec", rank, 9)
    assert_like(sharded, unsharded, ids)
    with torch.no_grad():
        ours, theirs = sharded(Batch(ids)).wait(), unsharded(Batch(ids))
    for name, rows in theirs.items():
        assert torch.equal(ours[name].weights(), rows.weights())
        assert ours[name].weights().dtype == rows.weights().dtype


def test_weights_of_a_checkpoint_and_of_a_rank_alone() -> None:
    run(2, _checkpoint)


def _checkpoint(rank: int) -> None:
    module = models.float_module("ebc")
    checkpoint = SparseOnly(module).state_dict()
    unsharded = models.quantized(SparseOnly(copy.deepcopy(module)), MIXED)
    model = models.quantized(SparseOnly(models.float_module("ebc", "meta")), MIXED)
    sharder = models.sharder_of("ebc", EXCHANGE, checkpoint=checkpoint)
    sharded = models.shard(model, sharder, "mixed")
    assert_like(sharded, unsharded, models.make_ids("ebc", rank, 9))
    # The state dict is this rank's rows, in the form of the unsharded module's.
    # FBGEMM's own buffers are in both as well.
    ours, theirs = (
        {name: tensor for name, tensor in model.state_dict().items() if ".tbes." not in name}
        for model in (sharded, unsharded)
    )
    here = {"t0", "t2"} | ({"t1", "t3"} if rank == 0 else set())
    assert sorted(ours) == sorted(name for name in theirs if name.split(".")[2] in here)
    for name, tensor in ours.items():
        table = int(name.split(".")[2][1])
        rows = models.ROWS[table]
        half = -(-rows // 2)
        begin, end = (0, rows) if table % 2 else (rank * half, min(rows, (rank + 1) * half))
        assert type(tensor) is type(theirs[name])
        mine, whole = (getattr(each, "elem", each) for each in (tensor, theirs[name]))
        assert torch.equal(mine, whole[begin:end])
    # What is written to it is what is looked up from then on.
    for tensor in ours.values():
        getattr(tensor, "elem", tensor).zero_()
    dist.barrier()
    with torch.no_grad():
        output = sharded(Batch(models.make_ids("ebc", rank, 9))).wait().values()
    assert not output.any()


def test_the_lookup_is_chosen_by_where_the_ranks_are() -> None:
    run(2, _lookup_is_chosen)


def _lookup_is_chosen(rank: int) -> None:
    from torchrec_bls.direct.process import this_process

    model = models.model_of("ebc", MIXED)
    here = models.shard(copy.deepcopy(model), models.sharder_of("ebc"), "row_wise")
    assert here.module.embeddings.reads_directly
    this_process().host = f"host {rank}"
    apart = models.shard(copy.deepcopy(model), models.sharder_of("ebc"), "row_wise")
    assert not apart.module.embeddings.reads_directly
    assert_like(apart, model, models.make_ids("ebc", rank, 5))
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] are on different hosts"):
        models.shard(
            copy.deepcopy(model), models.sharder_of("ebc", BLSConfig(lookup="direct")), "row_wise"
        )


@pytest.mark.parametrize("bound", [0, 2])
def test_a_pipeline(bound: int) -> None:
    run(2, _pipeline, bound)


def _pipeline(rank: int, bound: int) -> None:
    config = BLSConfig(lookup="exchange", bound=bound, deadline=30.0)
    for kind in ("ec", "weighted"):
        sharded, unsharded = both(kind, MIXED, "row_wise", config)
        pipeline = BoundedLagPipeline(sharded)
        # One rank has fewer batches, and one that does not fit.
        seeds = range(6 - 3 * rank)
        batches = [Batch(models.make_ids(kind, 10 * rank + seed, 5)) for seed in seeds]
        if rank == 1:
            batches[1].ids.values()[0] = 10_000
        outputs: list[Any] = []
        iterator = iter(batches)
        while True:
            try:
                outputs.append(pipeline.progress(iterator))
            except StopIteration:
                break
            except ValueError as error:
                outputs.append(str(error))
        assert len(outputs) == len(batches)
        for number, (batch, output) in enumerate(zip(batches, outputs, strict=True)):
            if rank == 1 and number == 1:
                assert "id 10000 at position 0" in output
                continue
            with torch.no_grad():
                assert_same_bits(as_float(flatten(output)), as_float(flatten(unsharded(batch))))

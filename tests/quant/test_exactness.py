"""Outputs of sharded quantized modules are those of TorchRec's unsharded ones, bit for bit."""

import copy
from typing import Any

import pytest
import torch

from tests.distributed.inputs.test_variable_batch import in_full, make_variable
from tests.distributed.models import Batch, Kind, SparseOnly, assert_same_bits, flatten
from tests.processes import run
from tests.quant import models
from torchrec_bls import BLSConfig

MIXED = ["int8", "int4", "int2", "fp16"]


def assert_like_unsharded(
    rank: int, kind: str, types: list[str], sharding: str, config: BLSConfig | None = None
) -> None:
    model = models.model_of(kind, types)
    unsharded = copy.deepcopy(model)
    sharded = models.shard(model, models.sharder_of(kind, config), sharding)
    batches = [
        models.make_ids(kind, 10 * rank, 5),
        models.make_ids(kind, 10 * rank + 1, 7 + rank, dtype=torch.int32),
        models.make_ids(kind, 10 * rank + 2, 0),
        models.make_ids(kind, 10 * rank + 3, 3, most_ids=0),
        models.make_ids(kind, 10 * rank + 4, 40, most_ids=20),
    ]
    # Ranks have different numbers of batches: nobody waits for another one.
    for ids in batches[: len(batches) - rank]:
        with torch.no_grad():
            ours, theirs = flatten(sharded(Batch(ids))), flatten(unsharded(Batch(ids)))
        assert_same_bits(_as_float(ours), _as_float(theirs))
    _assert_same_state(sharded.state_dict(), unsharded.state_dict())


def _as_float(output: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor.float() if tensor.dtype == torch.float16 else tensor
        for name, tensor in output.items()
    }


def _assert_same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert type(tensor) is type(theirs[name]) and tensor.shape == theirs[name].shape
        bytes_of = [getattr(each, "elem", each) for each in (tensor, theirs[name])]
        assert torch.equal(*bytes_of), name


@pytest.mark.parametrize("kind", models.KINDS)
def test_each_type(kind: str) -> None:
    run(2, _each_type, kind)


def _each_type(rank: int, kind: str) -> None:
    for name in models.TYPES:
        assert_like_unsharded(rank, kind, [name] * 4, "row_wise")
    assert_like_unsharded(rank, kind, MIXED, "table_wise")


@pytest.mark.parametrize("world_size", [3, 4])
def test_tables_of_several_types(world_size: int) -> None:
    run(world_size, _several_types)


def _several_types(rank: int) -> None:
    for kind in models.KINDS:
        assert_like_unsharded(rank, kind, MIXED, "mixed")
    assert_like_unsharded(rank, "ebc", MIXED[::-1], "row_wise")


def test_huge_pages_and_outputs_of_half_precision() -> None:
    run(2, _huge_pages_and_halves)


def _huge_pages_and_halves(rank: int) -> None:
    config = BLSConfig(lookup="direct", huge_pages=True)
    assert_like_unsharded(rank, "ebc", MIXED, "row_wise", config)
    model = models.model_of("ebc", MIXED, torch.half)
    unsharded = copy.deepcopy(model)
    sharded = models.shard(model, models.sharder_of("ebc"), "row_wise")
    ids = models.make_ids("ebc", rank, 9)
    with torch.no_grad():
        ours, theirs = sharded(Batch(ids)).wait().values(), unsharded(Batch(ids)).values()
    assert ours.dtype == torch.half
    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def test_from_a_float_checkpoint() -> None:
    run(2, _from_checkpoint)


def _from_checkpoint(rank: int) -> None:
    for kind, types in (("ebc", MIXED), ("ec", ["fp32", "int4", "int8", "int2"])):
        module = models.float_module(kind)
        checkpoint = SparseOnly(module).state_dict()
        unsharded = models.quantized(SparseOnly(copy.deepcopy(module)), types)
        model = models.quantized(SparseOnly(models.float_module(kind, "meta")), types)
        sharder = models.sharder_of(kind, checkpoint=checkpoint)
        sharded = models.shard(model, sharder, "mixed")
        ids = models.make_ids(kind, rank, 9)
        with torch.no_grad():
            assert_same_bits(flatten(sharded(Batch(ids))), flatten(unsharded(Batch(ids))))


def test_a_batch_size_per_key() -> None:
    run(2, _batch_size_per_key)


def _batch_size_per_key(rank: int) -> None:
    for lookup in ("direct", "exchange"):
        for kind in models.KINDS:
            model = models.model_of(kind, MIXED)
            unsharded = copy.deepcopy(model)
            config = BLSConfig(lookup=lookup)  # type: ignore[arg-type]
            sharded = models.shard(model, models.sharder_of(kind, config), "mixed")
            drawn = Kind(kind, len(models.ROWS))
            ids = make_variable(drawn, rank, [3, 1, 4 + rank, 2], 5)
            ids.values().remainder_(min(models.ROWS))
            with torch.no_grad():
                theirs = flatten(unsharded(Batch(in_full(drawn, ids))))
                assert_same_bits(flatten(sharded(Batch(ids))), theirs)

"""What can't be sharded or looked up is refused, and says why."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ShardingEnv

from tests.distributed.models import Batch, SparseOnly, assert_same_bits, flatten
from tests.processes import run
from tests.quant import models
from torchrec_bls import (
    BLSConfig,
    BLSQuantEmbeddingBagCollectionSharder,
    BoundedLagPipeline,
    CodecConfig,
    offer,
    publish,
)
from torchrec_bls.errors import RendezvousError

TYPES = ["int8", "int4", "int2", "fp16"]


def raised(error: type[Exception], what: Any) -> str:
    with pytest.raises(error) as caught:
        what()
    return str(caught.value)


def sharded(kind: str = "ebc", config: BLSConfig | None = None) -> tuple[Any, Any]:
    model = models.model_of(kind, TYPES)
    unsharded = copy.deepcopy(model)
    return models.shard(model, models.sharder_of(kind, config), "row_wise"), unsharded


def test_batches() -> None:
    run(2, _batches)


def _batches(rank: int) -> None:
    model, unsharded = sharded("weighted")
    good = models.make_ids("weighted", rank, 5)

    def look_up(ids: object) -> Any:
        with torch.no_grad():
            return model(Batch(ids)).wait()

    def with_(**changed: Any) -> KeyedJaggedTensor:
        parts = {
            "keys": good.keys(),
            "values": good.values(),
            "weights": good.weights(),
            "lengths": good.lengths(),
        }
        return KeyedJaggedTensor(**{**parts, **changed})

    if rank == 0:  # the other rank waits for nothing of it
        bad_ids = good.values().clone()
        bad_ids[0] = 700
        for ids, says in (
            (with_(values=bad_ids), "id 700 at position 0 of feature 'f0' is out of range"),
            (with_(values=good.values().float()), "float32, not integers"),
            (with_(weights=good.weights().double()), "take float32"),
            (with_(weights=None), "no weights"),
            (models.make_ids("weighted", 0, 5, keys=models.FEATURES[:2]), "lacks the features"),
            (torch.zeros(3), "not a KeyedJaggedTensor"),
        ):
            assert says in raised(ValueError, lambda ids=ids: look_up(ids))
        assert model.module.embeddings.refused_batches == 6
        assert "autograd is on" in raised(ValueError, lambda: model(Batch(good)))
    with torch.no_grad():
        assert_same_bits(flatten(model(Batch(good))), flatten(unsharded(Batch(good))))
        with torch.inference_mode():
            inside = model(Batch(good)).wait().values()
        assert torch.equal(inside, unsharded(Batch(good)).values())


def test_row_0_in_place_of_bad_ids() -> None:
    run(2, _row_0)


def _row_0(rank: int) -> None:
    model, unsharded = sharded("ec", BLSConfig(lookup="direct", bad_ids="row0"))
    lengths = torch.ones(4, dtype=torch.int32)
    bad, zero = (
        Batch(KeyedJaggedTensor(models.FEATURES, torch.tensor(ids), lengths=lengths))
        for ids in ([700, 3, -1, 5], [0, 0, 0, 5])
    )
    with torch.no_grad(), pytest.warns(UserWarning, match="looked up as row 0"):
        ours = flatten(model(bad))
    assert_same_bits(ours, flatten(unsharded(zero)))
    assert model.module.embeddings.replaced_ids == 3


def test_writes_are_refused_and_other_ranks_do_not_see_them() -> None:
    run(2, _writes)


def _writes(rank: int) -> None:
    writes: list[Callable[[Any], object]] = [
        lambda model: model.load_state_dict(model.state_dict()),
        lambda model: model.module.embeddings.embedding_bags["t0"].weight.zero_(),
        lambda model: model.module.embeddings.embedding_bags["t1"].weight.elem.zero_(),
    ]
    for write in writes:
        model, unsharded = sharded()
        batch = Batch(models.make_ids("ebc", rank, 5))
        with torch.no_grad():
            if rank == 0:
                write(model)
                assert "written to" in raised(ValueError, lambda m=model, b=batch: m(b))
            dist.barrier()
            if rank == 1:
                assert_same_bits(flatten(model(batch)), flatten(unsharded(batch)))
            dist.barrier()


def test_plans() -> None:
    run(2, _plans)


def _plans(rank: int) -> None:
    sharder = models.sharder_of("ebc")
    model = models.model_of("ebc", TYPES)
    says = raised(ValueError, lambda: models.shard(model, sharder, "column_wise"))
    assert re.search("column_wise.*one scale and shift", says)
    # On one rank: all say it.
    module = model.embeddings
    plan = models.plan_of(module, sharder, "row_wise")
    if rank == 1:
        plan["t2"].sharding_spec.shards[1].shard_sizes[0] -= 1
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    says = raised(ValueError, lambda: sharder.shard(module, plan, env))
    assert "rank 1: the shards of table 't2' in the plan are not its 1021 rows" in says


def test_modules_without_weights_or_with_other_weights() -> None:
    run(2, _weights)


def _weights(rank: int) -> None:
    model = models.quantized(SparseOnly(models.float_module("ebc", "meta")), TYPES)
    says = raised(ValueError, lambda: models.shard(model, models.sharder_of("ebc"), "table_wise"))
    assert "meta device and has no weights" in says
    module = models.float_module("ebc")
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(rank)
    other = models.quantized(SparseOnly(module), TYPES)
    sharder = models.sharder_of("ebc")
    says = raised(RendezvousError, lambda: models.shard(other, sharder, "row_wise"))
    assert "Load the same weights on every rank" in says
    # A checkpoint that one rank has not whole.
    checkpoint = SparseOnly(models.float_module("ebc")).state_dict()
    if rank == 1:
        del checkpoint["embeddings.embedding_bags.t3.weight"]
    sharder = models.sharder_of("ebc", checkpoint=checkpoint)
    says = raised(
        ValueError if rank == 1 else RendezvousError,
        lambda: models.shard(model, sharder, "row_wise"),
    )
    assert "has no 'embeddings.embedding_bags.t3.weight'" in says


def test_tables_that_are_exchanged_are_not_published() -> None:
    run(2, _unpublished)


def _unpublished(rank: int) -> None:
    model, _ = sharded(config=BLSConfig(lookup="exchange"))
    for act in (publish, lambda each: offer(each, f"nowhere/{rank}")):
        said = raised(ValueError, lambda act=act, model=model: act(model))
        assert "do not read their tables directly, but exchange embeddings" in said
    model, _ = sharded(config=BLSConfig(lookup="direct"))
    said = raised(ValueError, lambda: BoundedLagPipeline(model))
    assert "read quantized tables directly and exchange nothing" in said


@pytest.mark.parametrize("lookup", ["exchange", "auto"])
def test_codecs(lookup: str) -> None:
    config = BLSConfig(lookup=lookup, codecs=CodecConfig(forward="bf16"))
    with pytest.raises(ValueError, match=r"travel as they are stored.*leave codecs out"):
        BLSQuantEmbeddingBagCollectionSharder(config=config)

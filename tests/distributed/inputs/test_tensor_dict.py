"""Batches as TensorDicts of jagged tensors, as TorchRec takes them."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrec import KeyedJaggedTensor

from tests.distributed import models
from tests.distributed.inputs.test_first_batches import close, mix_of
from tests.processes import run
from tests.quant import models as quant
from torchrec_bls import BLSConfig, BoundedLagPipeline

KINDS = {kind.name: kind for kind in (models.EC, models.EBC)}


def as_dict(ids: KeyedJaggedTensor, keys: list[str]) -> Any:
    """Returns the ids as a TensorDict whose entries are in the order of `keys`."""
    jagged = {
        key: torch.nested.nested_tensor_from_jagged(
            ids[key].values(), lengths=None, offsets=ids[key].offsets().to(torch.int64)
        )
        for key in keys
    }
    return TensorDict(jagged, batch_size=[ids.stride()])


def look_up(rank: int, kind: models.Kind, lookup: str) -> None:
    model = models.shard(
        kind, mix_of(kind), kind.bls_sharder(BLSConfig(deadline=60, lookup=lookup))
    )
    theirs = models.shard(kind, mix_of(kind), kind.torchrec_sharder())
    whole = models.SparseOnly(kind.module())
    with torch.no_grad():
        for step in range(3):
            ids = models.make_ids(kind, 10 * step + rank, 3)
            # The order of entries may change; TorchRec takes it from the first batch.
            keys = kind.features[:: -1 if step else 1]
            found = models.flatten(model(models.Batch(as_dict(ids, keys))))
            close(found, models.flatten(whole(models.Batch(ids))))
            if lookup == "exchange":
                wanted = models.flatten(theirs(models.Batch(as_dict(ids, kind.features))))
                close(found, wanted)
        for bad, message in (
            (as_dict(ids, kind.features[1:]), r"lacks the features \['f0'\]"),
            (TensorDict({key: torch.zeros(3) for key in kind.features}), "no jagged tensors"),
        ):
            with pytest.raises(ValueError, match=message):
                models.arrived(model(models.Batch(bad)))
        found = models.flatten(model(models.Batch(ids)))  # a KeyedJaggedTensor after all
        close(found, models.flatten(whole(models.Batch(ids))))


@pytest.mark.parametrize("lookup", ["exchange", "direct"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_dict_is_looked_up_as_torchrec_does(kind: str, lookup: str) -> None:
    run(2, look_up, KINDS[kind], lookup)


def pipe(rank: int) -> None:
    config = BLSConfig(deadline=60, lookup="exchange", bound=1)
    model = quant.shard(
        quant.model_of("ebc", ["int8"] * 4), quant.sharder_of("ebc", config), "row_wise"
    )
    ids = [quant.make_ids("ebc", 10 * step + rank, 3) for step in range(4)]
    with torch.no_grad():
        expected = [models.flatten(model(models.Batch(each))) for each in ids]
    pipeline: BoundedLagPipeline[Any, Any] = BoundedLagPipeline(model)
    source = iter([models.Batch(as_dict(each, quant.FEATURES)) for each in ids])
    for wanted in expected:
        models.assert_same_bits(models.flatten(pipeline.progress(source)), wanted)


def test_a_quantized_model_in_a_pipeline() -> None:
    run(2, pipe)

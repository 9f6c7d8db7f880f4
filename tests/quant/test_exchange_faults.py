"""One rank's bad batch is its own, and a rank that is gone is named by the others."""

import copy
import os
import re
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from tests.distributed.models import Batch, SparseOnly, assert_same_bits, flatten
from tests.processes import run, run_outcomes
from tests.quant import models
from torchrec_bls import BLSConfig
from torchrec_bls.errors import BLSError, RendezvousError

TYPES = ["int8", "int4", "int2", "fp16"]
EXCHANGE = BLSConfig(lookup="exchange", deadline=30.0)


def raised(error: type[Exception], what: Any) -> str:
    with pytest.raises(error) as caught:
        what()
    return str(caught.value)


def both(kind: str, config: BLSConfig = EXCHANGE, sharding: str = "row_wise") -> tuple[Any, Any]:
    model = models.model_of(kind, TYPES)
    unsharded = copy.deepcopy(model)
    return models.shard(model, models.sharder_of(kind, config), sharding), unsharded


def test_a_bad_batch_is_refused_on_its_rank_alone() -> None:
    run(2, _bad_batches)


def _bad_batches(rank: int) -> None:
    model, unsharded = both("weighted")
    good = models.make_ids("weighted", rank, 5)

    def with_(**changed: Any) -> KeyedJaggedTensor:
        parts = {
            "keys": good.keys(),
            "values": good.values(),
            "weights": good.weights(),
            "lengths": good.lengths(),
        }
        return KeyedJaggedTensor(**{**parts, **changed})

    bad_ids = good.values().clone()
    bad_ids[0] = 700
    bad: list[tuple[Any, str]] = [
        # The first batch of all: the module has seen no keys yet.
        (models.make_ids("weighted", 0, 5, keys=models.FEATURES[:2]), "lacks the features"),
        (with_(values=bad_ids), "id 700 at position 0 of feature 'f0' is out of range"),
        (with_(weights=good.weights().double()), "take float32"),
        (with_(weights=None), "no weights"),
        (with_(lengths=good.lengths()[:-1]), "malformed|lengths"),
        (torch.zeros(3), "not a KeyedJaggedTensor"),
    ]
    with torch.no_grad():
        for ids, says in bad:
            if rank == 0:
                text = raised(ValueError, lambda ids=ids: model(Batch(ids)).wait())
                assert re.search(says, text) and "embeddings on rank 0" in text
            else:
                assert_same_bits(flatten(model(Batch(good))), flatten(unsharded(Batch(good))))
    # Autograd is one rank's mistake, too.
    if rank == 0:
        assert "autograd is on" in raised(ValueError, lambda: model(Batch(good)).wait())
    else:
        with torch.no_grad():
            model(Batch(good)).wait()
    with torch.no_grad(), torch.inference_mode():
        ours = model(Batch(good)).wait().values()
    assert torch.equal(ours, unsharded(Batch(good)).values())


def test_row_0_in_place_of_bad_ids() -> None:
    run(2, _row_0)


def _row_0(rank: int) -> None:
    config = BLSConfig(lookup="exchange", bad_ids="row0", deadline=30.0)
    model, unsharded = both("ec", config)
    lengths = torch.ones(4, dtype=torch.int32)
    bad, zero = (
        Batch(KeyedJaggedTensor(models.FEATURES, torch.tensor(ids), lengths=lengths))
        for ids in ([700, 3, -1, 5], [0, 0, 0, 5])
    )
    with torch.no_grad(), pytest.warns(UserWarning, match="looked up as row 0"):
        ours = flatten(model(bad))
    with torch.no_grad():
        assert_same_bits(ours, flatten(unsharded(zero)))
    assert model.module.embeddings.replaced_ids == 3


@pytest.mark.parametrize("bound", [0, 1])
def test_a_rank_that_is_gone_is_named(bound: int) -> None:
    outcomes = run_outcomes(3, _killed, bound)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank]
        assert "rank 1" in outcomes[rank].value


def _killed(rank: int, bound: int) -> str:
    config = BLSConfig(lookup="exchange", bound=bound, deadline=30.0)
    model, _ = both("ebc", config)
    batch = Batch(models.make_ids("ebc", rank, 5))
    with torch.no_grad():
        model(batch).wait()
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return raised(BLSError, lambda: [model(batch).wait() for _ in range(bound + 2)])


def test_other_plans_and_weights_that_one_rank_lacks() -> None:
    run(2, _disagreement)


def _disagreement(rank: int) -> None:
    plans = ["row_wise", "table_wise"]
    model, _ = both("ebc", sharding=plans[rank])
    batch = Batch(models.make_ids("ebc", rank, 5))
    with torch.no_grad():
        assert "same plan" in raised(RendezvousError, lambda: model(batch).wait())
    checkpoint = SparseOnly(models.float_module("ebc")).state_dict()
    meta = models.quantized(SparseOnly(models.float_module("ebc", "meta")), TYPES)
    if rank == 1:
        del checkpoint["embeddings.embedding_bags.t2.weight"]
    config = replace(EXCHANGE, name="from a checkpoint")  # the first model has not met the ranks
    sharder = models.sharder_of("ebc", config, checkpoint=checkpoint)
    missing = "has no 'embeddings.embedding_bags.t2.weight'"
    if rank == 1:
        assert missing in raised(ValueError, lambda: models.shard(meta, sharder, "row_wise"))
        dist.barrier()
        return
    sharded = models.shard(meta, sharder, "row_wise")
    with torch.no_grad():
        assert missing in raised(RendezvousError, lambda: sharded(batch).wait())
    dist.barrier()


def test_a_reason_of_one_rank_is_all_ranks() -> None:
    run(2, _one_reason)


def _one_reason(rank: int) -> None:
    # The meta device on one rank: with lookup="auto" none goes on to exchange.
    module = models.float_module("ebc", "meta" if rank == 1 else "cpu")
    model = models.quantized(SparseOnly(module), TYPES)
    text = raised(ValueError, lambda: models.shard(model, models.sharder_of("ebc"), "row_wise"))
    assert "rank 1: the module is on the meta device" in text

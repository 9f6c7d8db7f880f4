"""Models with equal modules: told apart by their names, or refused on all ranks."""

import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import models
from tests.processes import run
from tests.quant import models as quant_models
from torchrec_bls import BLSConfig
from torchrec_bls.errors import RendezvousError

KIND = models.EBC


def make(lookup: str, name: str | None, scale: float) -> Any:
    """Returns a model whose rows are those of the kind, times `scale`."""
    module = KIND.module()
    for parameter in module.parameters():
        parameter.data *= scale
    sharder = KIND.bls_sharder(BLSConfig(lookup=lookup, name=name, deadline=30.0))
    types = models.sharding_types(KIND, "row_wise", 1)
    plan = models.make_plan(module, types, sharder)
    return models.shard_model(models.SparseOnly(module), {"embeddings": plan}, [sharder])


def make_quantized(name: str | None, scale: float) -> Any:
    module = quant_models.float_module("ebc")
    for parameter in module.parameters():
        parameter.data *= scale
    model = quant_models.quantized(models.SparseOnly(module), ["fp32"] * 4)
    config = BLSConfig(lookup="exchange", name=name, deadline=30.0)
    return quant_models.shard(model, quant_models.sharder_of("ebc", config), "row_wise")


def pair(lookup: str, names: Sequence[str | None]) -> list[Any]:
    if lookup == "quantized":
        return [make_quantized(name, scale) for name, scale in zip(names, (1, 2), strict=True)]
    return [make(lookup, name, scale) for name, scale in zip(names, (1, 2), strict=True)]


def batch_of(lookup: str, rank: int) -> models.Batch:
    if lookup == "quantized":
        return models.Batch(quant_models.make_ids("ebc", rank, 4))
    return models.Batch(models.make_ids(KIND, rank, 4))


def total(model: Any, batch: models.Batch) -> float:
    (values,) = models.flatten(model(batch)).values()
    return float(values.double().sum())


LOOKUPS = ["exchange", "direct", "quantized"]


def call_in_different_orders(rank: int, lookup: str) -> None:
    """The ranks are together in two forwards, but each in that of another model at first."""
    both = pair(lookup, ["stable", "canary"])
    batch = batch_of(lookup, rank)
    with ThreadPoolExecutor(2) as pool:
        order = [0, 1] if rank == 0 else [1, 0]

        def call(number: int) -> float:
            with torch.no_grad():
                return total(both[number], batch)

        futures = {number: pool.submit(call, number) for number in order}
        totals = {number: future.result() for number, future in futures.items()}
    assert totals[1] == pytest.approx(2 * totals[0], rel=1e-5)
    dist.barrier()


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_named_models_keep_apart(lookup: str) -> None:
    run(2, call_in_different_orders, lookup)


def call_ambiguously(rank: int, lookup: str) -> str:
    both = pair(lookup, [None, None])
    if rank == 1:
        both.reverse()
    with torch.no_grad(), pytest.raises(RendezvousError) as caught:
        both[0](batch_of(lookup, rank)).wait()
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_equal_models_without_names_are_refused_on_all_ranks(lookup: str) -> None:
    for message in run(2, call_ambiguously, lookup):
        assert "two models of this process have a module of this name" in message
        assert "BLSConfig(name='canary')" in message


def call_where_one_rank_has_two(rank: int, lookup: str) -> str:
    """Only rank 0 has both models, and comes last."""
    both = pair(lookup, [None, None])
    if rank == 1:
        del both[1]
        gc.collect()
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    name = "embeddings"
    if rank == 0:
        store.wait([f"torchrec_bls/{name} plan/seat/1"])
    with torch.no_grad(), pytest.raises(RendezvousError) as caught:
        both[0](batch_of(lookup, rank)).wait()
    dist.barrier()
    return str(caught.value)


def test_ranks_that_wait_hear_of_the_refusal() -> None:
    messages = run(2, call_where_one_rank_has_two, "exchange")
    assert "rank 0 could not set it up: embeddings plan: two models" in messages[1]


def replace_models(rank: int) -> None:
    batch = batch_of("exchange", rank)
    with torch.no_grad():
        first = make("exchange", None, 1.0)
        once = total(first, batch)
        second = make("exchange", None, 2.0)  # the first one is known to the other ranks already
        assert total(second, batch) == pytest.approx(2 * once, rel=1e-5)
        assert total(first, batch) == once
        unused = make("exchange", None, 3.0)
        unused.itself = unused  # a cycle: it is garbage, but still there
        gc.disable()
        del unused
        assert total(make("exchange", None, 4.0), batch) == pytest.approx(4 * once, rel=1e-5)
        gc.enable()
    dist.barrier()


def test_models_that_have_met_and_models_that_are_garbage_are_no_twins() -> None:
    run(2, replace_models)


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\x00", 7])
def test_a_name_is_a_printable_text(name: Any) -> None:
    with pytest.raises(ValueError, match="must be a text of printable characters"):
        BLSConfig(name=name)

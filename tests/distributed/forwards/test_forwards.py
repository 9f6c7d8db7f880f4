"""A rank whose forward ends early takes part in the calls that the other ranks still make in it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedTensor

import torchrec_bls
from tests.distributed import models
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import BLSConfig
from torchrec_bls.errors import BatchRefusedError

KINDS = {"pooled": models.EBC, "rows": models.EC}
Rows = dict[str, torch.Tensor]


@dataclass
class Request:
    """Names of the modules to call, in turn. One call or the place before it fails, if any."""

    calls: Sequence[str]
    rank: int = 0
    bad_at: int | None = None
    fails_at: int | None = None
    error: type[BaseException] = ArithmeticError
    ids: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = [
            models.make_ids(KINDS[name], 10 * self.rank + at, 3)
            for at, name in enumerate(self.calls)
        ]
        if self.bad_at is not None:
            self.ids[self.bad_at] = torch.zeros(1)


def by_name(output: Any) -> Rows:
    """Returns the embeddings by feature. Their order depends on the plan."""
    output = models.arrived(output)
    if isinstance(output, KeyedTensor):
        output = output.to_dict()
    return {
        name: (output[name] if torch.is_tensor(output[name]) else output[name].values()).detach()
        for name in sorted(output)
    }


class Towers(nn.Module):
    """Uses the embeddings of each call before the next one."""

    def __init__(self) -> None:
        super().__init__()
        for name, kind in KINDS.items():
            setattr(self, name, kind.module())

    def forward(self, request: Request) -> list[Rows]:
        rows = []
        for at, name in enumerate(request.calls):
            if at == request.fails_at:
                raise request.error("by order")
            rows.append(by_name(getattr(self, name)(request.ids[at])))
        if request.fails_at == len(request.calls):
            raise request.error("by order")
        return rows


def sharded(lookup: str = "exchange", name: str | None = None) -> DistributedModelParallel:
    config = BLSConfig(deadline=60, lookup=lookup, name=name)
    sharders = [kind.bls_sharder(config) for kind in KINDS.values()]
    model = Towers()
    plans = {
        part: models.make_plan(getattr(model, part), ["table_wise"] * kind.tables, sharder)
        for (part, kind), sharder in zip(KINDS.items(), sharders, strict=True)
    }
    return models.shard_model(model, plans, sharders)


def check(model: Callable[[Request], list[Rows]], request: Request) -> None:
    """Compares with unsharded modules."""
    compare(model(request), request)


def compare(outputs: Sequence[Rows], request: Request) -> None:
    for rows, wanted in zip(outputs, Towers()(request), strict=True):
        torch.testing.assert_close(rows, wanted)  # sums are of another order


FAULTS = {
    "bad_at": pytest.raises(ValueError, match="input is a Tensor"),
    "fails_at": pytest.raises(ArithmeticError, match="by order"),
}


def fail(model: Callable[[Request], object], request: Request) -> None:
    fault = "bad_at" if request.bad_at is not None else "fails_at"
    with FAULTS[fault]:
        model(request)


def draw(order: random.Random, rank: int, world_size: int) -> Request:
    """Draws the same calls on all ranks, and ranks that fail in them."""
    calls = [order.choice(list(KINDS)) for _ in range(order.randrange(4))]
    faults: list[dict[str, int]] = [{} for _ in range(world_size)]
    for fault in faults:
        kind = order.choice(["", *FAULTS])
        if kind == "bad_at" and calls:
            fault[kind] = order.randrange(len(calls))
        if kind == "fails_at":
            fault[kind] = order.randint(0, len(calls))
    return Request(calls, rank, **faults[rank])  # type: ignore[arg-type]


@torch.no_grad()
def fail_at_random(rank: int, world_size: int, lookup: str, way: str) -> None:
    dmp = sharded(lookup)
    model: Any = {
        "model": dmp,
        "module": dmp.module,
        "compiled": torch.compile(dmp, backend="eager") if way == "compiled" else None,
    }[way]
    check(model, Request(list(KINDS), rank))
    order = random.Random(7)
    for _ in range(15):
        request = draw(order, rank, world_size)
        if request.bad_at is None and request.fails_at is None:
            check(model, request)
        else:
            fail(model, request)
        torch.distributed.barrier()  # in which no rank answers another
    check(model, Request(["rows", "pooled", "rows"], rank))


@pytest.mark.parametrize(
    ("world_size", "lookup", "way"),
    [
        (3, "exchange", "model"),
        (2, "direct", "model"),
        (2, "exchange", "module"),
        pytest.param(2, "exchange", "compiled", marks=pytest.mark.slow),
    ],
)
def test_the_other_ranks_get_their_rows_whatever_the_model_calls(
    world_size: int, lookup: str, way: str
) -> None:
    run(world_size, fail_at_random, world_size, lookup, way, deadline=240)


@torch.no_grad()
def fail_in_the_first_forward(rank: int, lookup: str, fault: str) -> None:
    model = sharded(lookup)
    calls = ["rows", "rows", "pooled"]
    if rank == 1:
        fail(model, Request(calls, rank, **{fault: 1}))  # type: ignore[arg-type]
    else:
        check(model, Request(calls, rank))
    check(model, Request(calls, rank))


@pytest.mark.parametrize("lookup", ["exchange", "auto"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_first_forward_that_fails_meets_the_other_ranks(lookup: str, fault: str) -> None:
    run(2, fail_in_the_first_forward, lookup, fault)


@torch.no_grad()
def fail_among_two_models(rank: int, lookup: str) -> None:
    first, second = sharded(lookup, "first"), sharded(lookup, "second")

    def both(requests: tuple[Request, Request]) -> list[list[Rows]]:
        with torchrec_bls.forward(first, second):
            return [first(requests[0]), second(requests[1])]

    good = Request(["rows", "pooled"], rank)
    assert len(both((good, good))) == 2
    for turn, fault in enumerate([*FAULTS, *FAULTS]):
        bad = Request(good.calls, rank, **{fault: turn % 2})  # type: ignore[arg-type]
        if rank == turn % 2:
            with FAULTS[fault]:
                both((bad, good))
            with FAULTS["fails_at"], torchrec_bls.forward(first, second):
                first(good)
                raise ArithmeticError("by order")
        else:
            for _ in range(2):
                for rows in both((good, good)):
                    compare(rows, good)
        # Models that alternate, each by itself.
        canary = (first, second)[turn % 2]
        if rank == turn // 2:
            fail(canary, bad)
        else:
            check(canary, good)
        check(second, good)


@pytest.mark.parametrize("lookup", ["exchange", "direct"])
def test_a_function_over_two_models_and_canaries(lookup: str) -> None:
    run(2, fail_among_two_models, lookup)


@torch.no_grad()
def interrupt(rank: int) -> None:
    model = sharded()
    calls = ["rows", "pooled", "rows"]
    good = Request(calls, rank)
    check(model, good)
    for at in range(3):
        if rank == 0:
            with pytest.raises(KeyboardInterrupt):
                model(Request(calls, rank, fails_at=at, error=KeyboardInterrupt))
        else:
            with pytest.raises(BatchRefusedError, match="its forward was interrupted"):
                model(good)
        check(model, good)


@pytest.mark.parametrize("world_size", slow_but([2], [2, 3]))
def test_the_rest_of_an_interrupted_forward_is_refused_by_the_next(world_size: int) -> None:
    run(world_size, interrupt)


def fail_in_training(rank: int) -> None:
    model = sharded()
    good = Request(["rows", "pooled"], rank)
    for fault in FAULTS:
        for at in range(2):
            if rank == 1:
                fail(model, Request(good.calls, rank, **{fault: at}))  # type: ignore[arg-type]
            else:
                with pytest.raises(BatchRefusedError):
                    model(good)
            with torch.no_grad():
                check(model, good)


def test_no_rank_trains_on_a_step_that_fails_on_one() -> None:
    run(2, fail_in_training)

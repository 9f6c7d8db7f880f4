"""Forwards that end early where ranks are about to meet, in training, and with several threads."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed import DistributedModelParallel

import torchrec_bls
from tests.distributed import models
from tests.distributed.forwards.test_forwards import (
    KINDS,
    Request,
    Rows,
    Towers,
    check,
    compare,
    fail,
)
from tests.processes import run
from torchrec_bls import (
    BLSConfig,
    BoundedLagChannel,
    bounded_lag_channels,
    bounded_lag_modules,
)
from torchrec_bls.distributed import config
from torchrec_bls.distributed.bounded_lag_module import BoundedLagModule
from torchrec_bls.distributed.exchanges import exchange
from torchrec_bls.errors import BatchRefusedError

LARGE = 1500
WAIT = 60.0


def sharded(model: nn.Module, **options: Any) -> DistributedModelParallel:
    sharders = [kind.bls_sharder(BLSConfig(**options)) for kind in KINDS.values()]
    plans = {
        part: models.make_plan(getattr(model, part), ["table_wise"] * kind.tables, sharder)
        for (part, kind), sharder in zip(KINDS.items(), sharders, strict=True)
    }
    return models.shard_model(model, plans, sharders)


def module_of(model: nn.Module, name: str) -> BoundedLagModule:
    (found,) = [each for path, each in bounded_lag_modules(model).items() if path.endswith(name)]
    return found


class Inference(Towers):
    """Turns autograd off by itself."""

    @torch.no_grad()
    def forward(self, request: Request) -> list[Rows]:
        return super().forward(request)


class Training(Towers):
    """Turns autograd on by itself."""

    @torch.enable_grad()
    def forward(self, request: Request) -> list[Rows]:
        return super().forward(request)


def fail_where_the_model_decides(rank: int, kind: type[Towers]) -> None:
    model = sharded(kind(), deadline=60)
    calls = ["rows", "pooled", "pooled"]
    with torch.set_grad_enabled(kind is Inference):  # the caller has it the other way
        check(model, Request(calls, rank))
        for at in range(3):
            if rank == 1:
                fail(model, Request(calls, rank, fails_at=at))
            elif kind is Inference:
                check(model, Request(calls, rank))
            else:
                with pytest.raises(BatchRefusedError, match="by order"):
                    model(Request(calls, rank))
        check(model, Request(calls, rank))


@pytest.mark.parametrize("kind", [Inference, Training])
def test_the_calls_of_a_forward_say_whether_it_trains(kind: type[Towers]) -> None:
    run(2, fail_where_the_model_decides, kind)


def fail_in_the_first_step(rank: int) -> None:
    config.INFERENCE_DEADLINE = 7.0  # below the group's timeout, which is that of training
    deadlines: list[float] = []

    def made(*args: Any, **options: Any) -> BoundedLagChannel:
        deadlines.append(options["deadline"])
        return BoundedLagChannel(*args, **options)

    exchange.BoundedLagChannel = made  # type: ignore[assignment, misc]
    model = sharded(Towers())
    calls = ["rows", "pooled"]
    if rank == 1:
        fail(model, Request(calls, rank, fails_at=1))
    else:
        with pytest.raises(BatchRefusedError):
            model(Request(calls, rank))
    check(model, Request(calls, rank))
    assert len(deadlines) == len(bounded_lag_channels(model))
    assert set(deadlines) == {module_of(model, "pooled").deadline}
    assert min(deadlines) > config.INFERENCE_DEADLINE


def test_a_rank_that_takes_part_in_a_step_has_the_deadline_of_training() -> None:
    run(2, fail_in_the_first_step)


@torch.no_grad()
def fail_on_two_of_three(rank: int, lookup: str) -> None:
    model = sharded(Towers(), deadline=30, lookup=lookup)
    calls = ["rows", "rows", "pooled", "pooled"]
    if rank > 0:
        fail(model, Request(calls, rank, fails_at=rank))  # before pooled has met
    else:
        check(model, Request(calls, rank))
    check(model, Request(calls, rank))


@pytest.mark.parametrize("lookup", ["exchange", "auto"])
def test_ranks_that_fail_together_before_a_first_meeting_do_not_wait_for_each_other(
    lookup: str,
) -> None:
    run(3, fail_on_two_of_three, lookup)


def large(calls: list[str], rank: int, **fault: int) -> Request:
    """Returns a request that outgrows slots, with the same size on all ranks."""
    request = Request(calls, rank, **fault)  # type: ignore[arg-type]
    request.ids = [
        models.make_ids(KINDS[name], 10 * rank + at, LARGE) for at, name in enumerate(calls)
    ]
    return request


@torch.no_grad()
def fail_where_slots_grow(rank: int, failing: tuple[int, ...], calls: list[str]) -> None:
    model = sharded(Towers(), deadline=30)
    check(model, Request(list(KINDS), rank))
    ids = module_of(model, calls[-1])._bls.exchanges.of("table_wise", "ids")
    assert ids.channel is not None
    small = ids.channel
    while not ids.growth_is_due:  # on all ranks after the same call
        check(model, large(calls[-1:], rank))
    for _ in range(2):
        if rank in failing:
            fail(model, large(calls, rank, fails_at=len(calls) - 1))
        else:
            check(model, large(calls, rank))
        assert ids.channel is not small and not ids.growth_is_due
    check(model, large(calls, rank))
    check(model, Request(list(KINDS), rank))


@pytest.mark.parametrize(
    ("failing", "calls"),
    [((1,), ["rows"]), ((1, 2), ["pooled"]), ((0, 2), ["pooled", "rows"])],
)
def test_a_rank_whose_forward_ended_comes_to_where_slots_grow(
    failing: tuple[int, ...], calls: list[str]
) -> None:
    run(3, fail_where_slots_grow, failing, calls)


@torch.no_grad()
def fail_before_slots_grow(rank: int) -> None:
    """All forwards end early on rank 1, after its last call, also the one before slots grow."""
    model = sharded(Towers(), deadline=30)
    check(model, Request(list(KINDS), rank))
    ids = module_of(model, "rows")._bls.exchanges.of("table_wise", "ids")
    while not ids.growth_is_due:
        if rank == 1:
            fail(model, large(["rows"], rank, fails_at=1))
        else:
            check(model, large(["rows"], rank))
    check(model, large(["rows"], rank))
    assert not ids.growth_is_due


def test_nobody_comes_for_ranks_that_are_in_the_next_forward() -> None:
    run(3, fail_before_slots_grow)


class Gated(Towers):
    """Waits inside of its forward, if told to, before it calls a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __deepcopy__(self, memo: object) -> "Gated":
        new = Gated()
        new.load_state_dict(self.state_dict())
        return new

    def forward(self, request: Request, waits: bool = False) -> list[Rows]:
        if waits:
            self.inside.set()
            assert self.go_on.wait(WAIT)
        return super().forward(request)


@contextmanager
def beside(function: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Runs a function in a thread during a block. Yields its errors, which come at the end."""
    errors: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    yield errors
    thread.join(WAIT)
    assert not thread.is_alive()


def enter_by_two_threads(rank: int, lookup: str, way: str) -> None:
    model = sharded(Gated(), deadline=60, lookup=lookup)
    towers = model.module
    calls = ["rows", "pooled"]

    @torch.no_grad()
    def first() -> None:
        if way == "model":
            compare(model(Request(calls, rank), waits=True), Request(calls, rank))
            return
        with torchrec_bls.forward(model):
            towers.inside.set()
            assert towers.go_on.wait(WAIT)
            check(model, Request(calls, rank))

    @torch.no_grad()
    def second() -> None:
        if way == "model":
            check(model, Request(calls, rank))
            return
        with torchrec_bls.forward(model):
            entered.append(rank)
            check(model, Request(calls, rank))

    entered: list[int] = []
    numbers = [each.forwards.now[0] for each in bounded_lag_modules(model).values()]
    assert numbers == [0, 0]
    with beside(first) as errors:
        assert towers.inside.wait(WAIT)
        try:
            if lookup == "direct":
                second()
            else:
                with pytest.raises(ValueError, match="another thread of this process"):
                    second()
                assert not entered
                # The other thread has not called a module yet.
                assert [e.forwards.now[0] for e in bounded_lag_modules(model).values()] == numbers
        finally:
            towers.go_on.set()
    assert not errors
    second()


@pytest.mark.parametrize("way", ["model", "with"])
@pytest.mark.parametrize("lookup", ["exchange", "direct"])
def test_two_threads_in_the_first_forward(lookup: str, way: str) -> None:
    run(2, enter_by_two_threads, lookup, way)

"""A forward that fails on one rank, for each way to call models and each fault."""

import copy
from collections.abc import Callable
from itertools import chain, cycle

import pytest
import torch

import torchrec_bls
from tests.distributed.forwards.cells import cell
from tests.distributed.forwards.test_forwards import (
    FAULTS,
    Request,
    Rows,
    check,
    sharded,
)
from tests.processes import run
from tests.tiers import slow_where
from torchrec_bls.errors import BatchRefusedError

Call = Callable[[Request], list[Rows]]
RAISES = FAULTS | {"interrupted_at": pytest.raises(KeyboardInterrupt)}
CALLS = [["rows", "pooled"], ["pooled", "rows", "pooled"], ["rows"]]


def part(request: Request, first: int, last: int) -> Request:
    """Returns some of the calls, and the fault if it is in front of one of them or behind the last
    of all."""
    of = copy.copy(request)
    of.calls, of.ids = request.calls[first:last], request.ids[first:last]
    end = last + (last == len(request.calls))
    at = request.fails_at
    of.fails_at = None if at is None or not first <= at < end else at - first
    return of


def one_model(lookup: str) -> Call:
    return sharded(lookup, "one")


def its_module(lookup: str) -> Call:
    module: Call = sharded(lookup, "module").module
    return module


def compiled(lookup: str) -> Call:
    function: Call = torch.compile(sharded(lookup, "compiled"), backend="eager")
    return function


def two_models(lookup: str) -> Call:
    first, second = sharded(lookup, "first"), sharded(lookup, "second")

    def both(request: Request) -> list[Rows]:
        with torchrec_bls.forward(first, second):
            return [*first(part(request, 0, 1)), *second(part(request, 1, len(request.calls)))]

    return both


def canaries(lookup: str) -> Call:
    """Two models of which each has two calls in turn: the one that fails, and the next one."""
    stable, canary = sharded(lookup, "stable"), sharded(lookup, "canary")
    turns = cycle([stable, stable, canary, canary])

    def one(request: Request) -> list[Rows]:
        rows: list[Rows] = next(turns)(request)
        return rows

    return one


def without_a_model(lookup: str) -> Call:
    """Modules of a model, called by a function that makes one forward of them."""
    model = sharded(lookup, "parts").module

    def call(request: Request) -> list[Rows]:
        with torchrec_bls.forward(model.rows, model.pooled):
            rows: list[Rows] = type(model).forward(model, request)
            return rows

    return call


USES = (one_model, its_module, compiled, two_models, canaries, without_a_model)


def request_of(calls: list[str], rank: int, fault: str, at: int) -> Request:
    if fault == "interrupted_at":
        return Request(calls, rank, fails_at=at, error=KeyboardInterrupt)
    return Request(calls, rank, **{fault: at})  # type: ignore[arg-type]


def fail_on_one_rank(call: Call, calls: list[str], rank: int, at: tuple[int, str, int]) -> None:
    """Plays a cell, and then a forward in which all ranks get their rows.

    Args:
        at: rank that fails; the fault; and its place.
    """
    bad_rank, fault, place = at
    good = Request(calls, rank)
    refuses = torch.is_grad_enabled() or fault == "interrupted_at"
    if rank == bad_rank:
        with RAISES[fault]:
            call(request_of(calls, rank, fault, place))
    elif refuses and place < len(calls):
        with pytest.raises(BatchRefusedError):
            call(good)
    else:
        check(call, good)
    check(call, good)


def places(calls: list[str], fault: str) -> range:
    return range(len(calls) + (fault != "bad_at"))


def play(rank: int, world_size: int, lookup: str, names: list[str]) -> None:
    turn = 0
    for use in USES:
        if use.__name__ not in names:
            continue
        with torch.no_grad():
            call = use(lookup)
            for _ in range(4):  # of canaries, each twice
                check(call, Request(["rows", "pooled"], rank))
            for calls, fault in ((calls, fault) for calls in CALLS for fault in RAISES):
                for place in places(calls, fault):
                    turn += 1
                    with cell(use.__name__, calls, fault, place):
                        if lookup == "direct":
                            read_alone(call, calls, rank, (turn % world_size, fault, place))
                        else:
                            fail_on_one_rank(call, calls, rank, (turn % world_size, fault, place))
        if lookup == "direct":
            continue
        for fault, place in chain(*([(f, at) for at in range(2)] for f in FAULTS)):
            turn += 1
            with cell("under autograd", use.__name__, fault, place):
                fail_on_one_rank(call, CALLS[0], rank, (turn % world_size, fault, place))


def read_alone(call: Call, calls: list[str], rank: int, at: tuple[int, str, int]) -> None:
    """Plays a cell of direct reads, where no other rank takes part in anything."""
    if rank == at[0]:
        with RAISES[at[1]]:
            call(request_of(calls, rank, *at[1:]))
    check(call, Request(calls, rank))


EAGER = [use.__name__ for use in USES if use is not compiled]


@pytest.mark.parametrize(
    ("world_size", "lookup", "names"),
    slow_where(
        lambda case: case[0] > 2 or case[2] == ["compiled"],
        [
            *((n, lookup, EAGER) for n in (2, 3, 4) for lookup in ("exchange", "direct")),
            *((n, "exchange", ["compiled"]) for n in (2, 4)),
        ],
    ),
)
def test_the_others_get_their_rows_and_the_next_forward_works(
    world_size: int, lookup: str, names: list[str]
) -> None:
    run(world_size, play, world_size, lookup, names, deadline=240)

"""Forwards that fail in a BoundedLagPipeline, around it, and after it has given its model back."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrec_bls
from tests.distributed.forwards.cells import cell
from tests.distributed.forwards.pipelined import (
    FAULTS,
    Batch,
    batches,
    compare,
    make_batch,
    sharded,
    with_fault,
)
from tests.processes import run
from tests.tiers import slow_but, slow_where
from torchrec_bls import BoundedLagPipeline
from torchrec_bls.errors import BadBatchError, BLSError, PipelineError, PoisonedError

STEPS = 6


def outputs_of(pipeline: Any, data: Iterator[Batch], rank: int) -> list[int]:
    """Returns the steps that failed. The outputs of the others are compared."""
    failed = []
    for step in range(STEPS):
        try:
            _, output = pipeline.progress(data)
        except PipelineError as error:
            assert error.iteration % STEPS == step
            failed.append(step)
        else:
            compare(output, make_batch(rank, step))
    with pytest.raises(StopIteration):
        pipeline.progress(data)
    return failed


@torch.no_grad()
def fail_in_turn(rank: int, world_size: int, lookup: str, bound: int) -> None:
    model = sharded(f"bound {bound}", lookup, bound)
    for turn, fault in enumerate(FAULTS):
        with cell("in a pipeline", fault):
            pipeline: Any = BoundedLagPipeline(model)
            bad = turn % world_size == rank
            faults = {2: fault, 5: fault} if bad else {}
            assert outputs_of(pipeline, batches(rank, faults, STEPS), rank) == list(faults)
            if bad:
                alone = with_fault(make_batch(rank, 0), fault)
                with pytest.raises(BadBatchError if "bad" in fault else PipelineError):
                    pipeline.progress(iter([alone]))
                    pipeline.progress(iter(()))
            pipeline.drain()
            pipeline.detach()
        with cell("after detach", fault):
            if bad:
                with pytest.raises((ValueError, ArithmeticError)):
                    model(with_fault(make_batch(rank, 1), fault))
            else:
                compare(model(make_batch(rank, 1))[1], make_batch(rank, 1))
            compare(model(make_batch(rank, 2))[1], make_batch(rank, 2))


@torch.no_grad()
def call_around(rank: int, world_size: int, lookup: str, bound: int) -> None:
    """Scopes leave alone what belongs to a pipeline, and nobody waits at their ends."""
    model = sharded(f"around, bound {bound}", lookup, bound)
    other = sharded(f"beside, bound {bound}", lookup)
    pipeline: Any = BoundedLagPipeline(model)
    data = batches(rank, {}, STEPS)
    for step in range(STEPS):
        with cell("around a pipeline", step):
            if step == 0 or rank != step % world_size:
                with torchrec_bls.forward(model, other):
                    compare(pipeline.progress(data)[1], make_batch(rank, step))
                    compare(other(make_batch(rank, step))[1], make_batch(rank, step))
                continue
            with pytest.raises(ArithmeticError), torchrec_bls.forward(model, other):
                compare(pipeline.progress(data)[1], make_batch(rank, step))
                if lookup == "exchange":
                    with pytest.raises(ValueError, match="belongs to a BoundedLagPipeline"):
                        model(make_batch(rank, 9))
                raise ArithmeticError("between two models")
    with pytest.raises(StopIteration):
        pipeline.progress(data)


def play(rank: int, world_size: int, lookup: str, bounds: tuple[int, ...]) -> None:
    for bound in bounds:
        fail_in_turn(rank, world_size, lookup, bound)
        call_around(rank, world_size, lookup, bound)


@pytest.mark.parametrize(
    ("world_size", "lookup", "bounds"),
    slow_where(
        lambda case: case != (2, "exchange", (0, 1)),
        [(n, lookup, (0, 1)) for n in (2, 3, 4) for lookup in ("exchange", "direct")],
    ),
)
def test_a_batch_that_fails_costs_its_rank_one_output(
    world_size: int, lookup: str, bounds: tuple[int, ...]
) -> None:
    run(world_size, play, world_size, lookup, bounds, deadline=240)


def struck(rank: int, at: int) -> Iterator[Batch]:
    for step, batch in enumerate(batches(rank, {}, 2 * STEPS)):
        if step == at:
            strike()
        yield batch


def strike(*_: Any) -> None:
    raise KeyboardInterrupt


@torch.no_grad()
def interrupt(rank: int, bound: int, lookup: str) -> None:
    model = sharded("interrupted", lookup, bound)
    pipeline: Any = BoundedLagPipeline(model)
    data = batches(rank, {}, 2 * STEPS)
    compare(pipeline.progress(data)[1], make_batch(rank, 0))
    dist.barrier()
    if rank == 1:
        # While a batch is loaded, nothing has been sent for it.
        with pytest.raises(KeyboardInterrupt):
            pipeline.progress(struck(rank, 0))
    compare(pipeline.progress(data)[1], make_batch(rank, 1))
    dist.barrier()
    if rank == 1:
        hook = model.module.between.register_forward_pre_hook(strike)
        with pytest.raises(KeyboardInterrupt):
            pipeline.progress(data)
        hook.remove()
    if lookup == "direct":
        compare(pipeline.progress(data)[1], make_batch(rank, 3 if rank == 1 else 2))
        return
    with pytest.raises(BLSError) as caught:
        for _ in range(2 + 2 * bound):
            pipeline.progress(data)
    if rank != 1:
        assert isinstance(caught.value, PoisonedError)
        assert "rank 1 failed" in str(caught.value) and "KeyboardInterrupt" in str(caught.value)
    # As the page on failures says: detach, and shard anew.
    pipeline.detach()
    anew: Any = BoundedLagPipeline(sharded("anew", lookup, bound))
    compare(anew.progress(batches(rank, {}))[1], make_batch(rank, 0))


@pytest.mark.parametrize(
    ("world_size", "bound", "lookup"),
    slow_but(
        [(2, 1, "exchange")],
        [(2, 1, "exchange"), (3, 0, "exchange"), (4, 1, "exchange"), (3, 0, "direct")],
    ),
)
def test_the_next_progress_after_an_interrupt_fails_or_goes_on(
    world_size: int, bound: int, lookup: str
) -> None:
    run(world_size, interrupt, bound, lookup)

"""Forwards that fail in TorchRec's pipelines, which post ids of later batches before them."""

import gc
from itertools import count
from typing import Any

import pytest
import torch

from tests.distributed import models
from tests.distributed.forwards.cells import cell
from tests.distributed.forwards.pipelined import (
    FAULTS,
    PIPELINES,
    STEPS,
    batches,
    compare,
    make_batch,
    make_pipeline,
    sharded,
    with_fault,
)
from tests.distributed.results.test_training import state_of
from tests.processes import run
from tests.tiers import slow_where
from torchrec_bls.errors import BatchRefusedError, BLSError, PoisonedError

NUMBERS = count()
# A pipeline that can't go on posts ids in each step, and so do the others before their last batch.
FURTHER = 3


def new_model(lookup: str = "exchange") -> Any:
    """Returns a model of a name of its own: failures end channels for good."""
    return sharded(f"model {next(NUMBERS)}", lookup)


def play_pipeline(
    pipeline: Any, rank: int, faults: dict[int, str], further: int = 0
) -> list[Exception | None]:
    """Runs all steps, and compares the outputs. Returns the errors by step.

    Args:
        further: number of batches behind those of the steps.
    """
    data, errors = batches(rank, faults, STEPS + further), []
    for step in range(STEPS):
        try:
            output = pipeline.progress(data)
        except Exception as error:
            errors.append(error.with_traceback(None))
        else:
            errors.append(None)
            if output is not None:
                compare(output, make_batch(rank, step))
    return errors


@torch.no_grad()
def fail_and_go_on(rank: int, world_size: int, lookup: str) -> None:
    """TorchRec's pipelines can't go on after an error. The others do."""
    turn = 0
    for name in PIPELINES:
        # More ranks differ in who waits for whom, and not in the faults.
        for fault in FAULTS if world_size == 2 else ("bad pooled", "fails at 1"):
            turn += 1
            # In the first batch modules have no channels yet. Direct reads are chosen in the first
            # good one, for which TrainPipelineBase, which repeats a bad one, has to wait.
            at = (turn - 1) % STEPS if lookup == "exchange" else 2
            with cell(name, fault, at):
                pipeline = make_pipeline(name, new_model(lookup))
                if rank == turn % world_size:
                    errors = play_pipeline(pipeline, rank, {at: fault}, FURTHER)
                    expected = ValueError if fault.startswith("bad") else ArithmeticError
                    assert errors[:at] == [None] * at and isinstance(errors[at], expected), errors
                else:
                    assert play_pipeline(pipeline, rank, {}, FURTHER) == [None] * STEPS


@torch.no_grad()
def catch(rank: int, world_size: int) -> None:
    """A custom_model_fwd that catches an error goes on with the next batch."""
    model = new_model()
    for turn, fault in enumerate(FAULTS):
        with cell("custom_model_fwd", fault):

            def answer(batch: Any) -> Any:
                try:
                    return model(batch)
                except (ValueError, ArithmeticError):
                    return torch.zeros(1), None

            pipeline = make_pipeline("TrainPipelineSparseDist", model, custom_model_fwd=answer)
            bad = {0: fault, 2: fault, 3: fault} if rank == turn % world_size else {2: fault}
            assert play_pipeline(pipeline, rank, bad) == [None] * STEPS
            with pytest.raises(StopIteration):
                pipeline.progress(batches(rank, {}, 0))
            pipeline.detach()
            compare(model(make_batch(rank, 7))[1], make_batch(rank, 7))
            # Nothing is owed any more.
            if rank == 0:
                with pytest.raises(ArithmeticError):
                    model(with_fault(make_batch(rank, 8), "fails at 1"))
            else:
                compare(model(make_batch(rank, 8))[1], make_batch(rank, 8))


@torch.no_grad()
def end_a_pipeline(rank: int, world_size: int) -> None:
    """A rank that resets its pipeline, or drops it, after a failure can't make the calls ahead."""
    for name in ("TrainPipelineSparseDist", "EvalPipelineSparseDist"):
        for resets in (True, False):
            with cell(name, "reset" if resets else "dropped"):
                model = new_model()
                pipeline = make_pipeline(name, model)
                errors = []
                try:
                    errors += play_steps(pipeline, rank, {1: "bad rows"} if rank == 1 else {})
                except ValueError:
                    assert rank == 1
                if rank == 1:
                    if resets:
                        pipeline.reset()
                    else:
                        pipeline.detach()
                        del pipeline
                        gc.collect()
                        pipeline = make_pipeline(name, model)
                    with pytest.raises(BLSError, match="Shard the model anew on all ranks"):
                        play_steps(pipeline, rank, {})
                else:
                    (error,) = errors
                    assert isinstance(error, PoisonedError), error
                    assert "rank 1 failed" in str(error)
                    assert "a forward failed in a pipeline, which was dropped" in str(error)


def play_steps(pipeline: Any, rank: int, faults: dict[int, str]) -> list[BLSError]:
    """Runs steps until the run fails, and returns the error."""
    data = batches(rank, faults)
    for _ in range(STEPS):
        try:
            pipeline.progress(data)
        except PoisonedError as error:
            return [error]
    raise AssertionError("the run has not failed")


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    head = {name: p.detach().clone() for name, p in model.module.head.named_parameters()}
    return {name: tensor.clone() for name, tensor in state_of(model).items()} | head


def fail_in_training(rank: int, world_size: int) -> None:
    """No rank steps. After a refused batch all ranks may reset their pipelines and go on."""
    turn = 0
    for name in [name for name in PIPELINES if not name.startswith("Eval")]:
        model = new_model()
        for fault in ("bad rows", "bad pooled"):
            turn += 1
            with cell("training", name, fault):
                pipeline = make_pipeline(name, model, trains=True)
                data = batches(rank, {2: fault} if rank == turn % world_size else {})
                for _ in range(2):
                    pipeline.progress(data)
                before = weights_of(model)
                with pytest.raises((ValueError, BatchRefusedError)):
                    pipeline.progress(data)
                models.assert_same_bits(weights_of(model), before)
                pipeline.reset()
                pipeline.progress(batches(rank, {}))
                assert any(
                    not torch.equal(tensor, before[key])
                    for key, tensor in weights_of(model).items()
                )
        for fault in ("fails at 0", "fails at 1"):
            turn += 1
            with cell("training", name, fault):
                model = new_model()
                pipeline = make_pipeline(name, model, trains=True)
                bad = rank == turn % world_size
                data = batches(rank, {1: fault} if bad else {})
                pipeline.progress(data)
                before = weights_of(model)
                with pytest.raises((ArithmeticError, BLSError)) as caught:
                    pipeline.progress(data)
                models.assert_same_bits(weights_of(model), before)
                if bad:
                    continue
                if name == "TrainPipelineBase":
                    assert isinstance(caught.value, BatchRefusedError)
                else:
                    assert f"rank {turn % world_size} failed" in str(caught.value)
                    assert "by order. Shard the model anew" in str(caught.value)


@torch.no_grad()
def interrupt(rank: int, world_size: int) -> None:
    """The next forward of the interrupted rank refuses the rest, or fails all if ids are ahead."""
    for name in PIPELINES:
        with cell("Ctrl-C", name):
            model = new_model()
            pipeline = make_pipeline(name, model)
            data = batches(rank, {})
            pipeline.progress(data)
            if rank == 1:
                struck = model.module.between.register_forward_pre_hook(strike)
                with pytest.raises(KeyboardInterrupt):
                    pipeline.progress(data)
                struck.remove()
                if name == "TrainPipelineBase":
                    pipeline.progress(data)
                else:
                    # TorchRec's own error hides what the end of the forward has raised.
                    with pytest.raises((BLSError, AssertionError)):
                        pipeline.progress(data)
            elif name == "TrainPipelineBase":
                with pytest.raises(BatchRefusedError, match="interrupted"):
                    pipeline.progress(data)
                pipeline.progress(data)
            else:
                with pytest.raises(
                    PoisonedError, match=r"rank 1 failed: .*was interrupted\. Shard"
                ):
                    pipeline.progress(data)


def strike(*_: Any) -> None:
    raise KeyboardInterrupt


def play(rank: int, world_size: int) -> None:
    fail_and_go_on(rank, world_size, "exchange")
    catch(rank, world_size)
    end_a_pipeline(rank, world_size)
    fail_in_training(rank, world_size)
    interrupt(rank, world_size)


def play_direct(rank: int, world_size: int) -> None:
    fail_and_go_on(rank, world_size, "direct")


@pytest.mark.parametrize(
    ("world_size", "lookup"),
    slow_where(
        lambda case: case != (2, "exchange"),
        [(world_size, lookup) for world_size in (2, 3, 4) for lookup in ("exchange", "direct")],
    ),
)
def test_pipelines_fail_where_a_batch_is_used_and_others_get_their_rows(
    world_size: int, lookup: str
) -> None:
    run(world_size, play if lookup == "exchange" else play_direct, world_size, deadline=240)

"""Driving a pipeline under delays: order, draining, and where the time is booked."""

import time
from collections import deque
from collections.abc import Iterator

import pytest
import torch

from benchmarks.demo.steps import Progress, run_steps

STEPS = 6


def pipeline(depth: int, work: float = 0.0) -> Progress:
    """A pipeline that holds ``depth`` batches back; a batch here is a tensor."""
    held: deque[torch.Tensor] = deque()

    def progress(batches: Iterator[torch.Tensor]) -> torch.Tensor:
        while len(held) <= depth:
            try:
                held.append(next(batches))
            except StopIteration:
                break
        time.sleep(work)
        if not held:
            raise StopIteration
        return held.popleft() * 2

    return progress


@pytest.mark.parametrize("depth", [0, 1, 4, 20])
def test_results_come_in_order_at_any_depth(depth: int) -> None:
    batches = [torch.tensor([float(step)]) for step in range(STEPS)]
    asked = []
    logits, times = run_steps(
        pipeline(depth),
        batches,
        [0.002] * STEPS,
        waited=lambda: 0.0,
        on_step=lambda: asked.append(1),
    )
    assert torch.cat(logits).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert len(asked) == STEPS
    assert len(times.slept) == len(times.own) == STEPS + 1
    assert min(times.slept[:-1]) >= 0.002
    assert times.slept[-1] == 0.0
    assert sum(times.slept) + sum(times.own) == pytest.approx(times.total)
    # A batch is answered `depth` steps after its own, each of which takes its delay at least.
    assert len(times.answered) == STEPS
    for step, seconds in enumerate(times.answered):
        assert seconds >= 0.002 * min(depth + 1, STEPS - step)


def test_waiting_is_not_own_work() -> None:
    clock = {"waited": 100.0}

    def waiting_pipeline(batches: Iterator[torch.Tensor]) -> torch.Tensor:
        batch = next(batches)
        time.sleep(0.005)
        clock["waited"] += 0.004
        return batch

    batches = [torch.zeros(1)] * STEPS
    _, times = run_steps(
        waiting_pipeline,
        batches,
        [0.0] * STEPS,
        waited=lambda: clock["waited"],
        on_step=lambda: None,
    )
    assert times.waited == pytest.approx(0.004 * STEPS)
    assert min(times.own[:STEPS]) >= 0.001
    assert sum(times.own) + sum(times.slept) + times.waited == pytest.approx(times.total)


def test_a_lost_result_is_an_error() -> None:
    def forgetful(batches: Iterator[torch.Tensor]) -> torch.Tensor:
        next(batches)
        return next(batches)

    with pytest.raises(RuntimeError, match="2 results for 4 batches"):
        run_steps(
            forgetful,
            [torch.zeros(1)] * 4,
            [0.0] * 4,
            waited=lambda: 0.0,
            on_step=lambda: None,
        )

"""When gradients of several ranks are ready, by a clock that is set by hand."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.overlap.plans import WIDTH, make_model
from tests.processes import run
from torchrec_bls.overlap.measured.dense_layers import (
    LEAST_SAMPLES,
    MeasuredBackward,
    measure_layers,
)

# Microseconds since the begin, of the layers from the last to the first.
READY = ((1000.0, 2000.0, 3000.0, 4000.0), (1500.0, 2100.0, 3000.0, 3900.0))
REDUCED = (4600.0, 4700.0)


def measured(rank: int) -> MeasuredBackward:
    moments = [moment for moment in READY[rank] for _ in ("bias", "weight")]
    clock = "torchrec_bls.overlap.measured.timed_backwards.Clock.since_begin_us"
    with patch(clock, return_value=[*moments, REDUCED[rank]]):
        return measure_layers(make_model(), [torch.zeros(4, WIDTH)], dist.group.WORLD)


def test_a_layer_is_ready_when_the_last_rank_has_it() -> None:
    first, second = run(2, measured)
    assert first == second
    times = [layer.compute_us for layer in first.layers]
    assert times == [(each,) * LEAST_SAMPLES for each in (1500.0, 600.0, 900.0, 1000.0)]
    assert first.reduced_us == (700.0,) * LEAST_SAMPLES
    names = [layer.parameters[0] for layer in first.layers]
    assert names == ["6.bias", "4.bias", "2.bias", "0.bias"]


def reduced(rank: int) -> tuple[list[float], MeasuredBackward]:
    """Means over the ranks of what is all-reduced, and what is measured."""
    model, means = make_model(), []
    plain = dist.all_reduce

    def noting(tensor: torch.Tensor, *arguments: Any, **how: Any) -> Any:
        work = plain(tensor, *arguments, **how)
        work.wait()
        means.append(float(tensor.double().norm()))
        return work

    with patch.object(dist, "all_reduce", noting):
        found = measure_layers(model, [torch.full((4, WIDTH), 1.0 + rank)], dist.group.WORLD)
    assert all(parameter.grad is None for parameter in model.parameters())
    return means, found


def test_all_gradients_are_reduced_behind_each_backward() -> None:
    gradients = []
    for rank in range(2):
        model = make_model()
        model(torch.full((4, WIDTH), 1.0 + rank)).sum().backward()
        gradients.append(torch.cat([each.grad.flatten() for each in model.parameters()]))
    mean = float(torch.stack(gradients).double().mean(dim=0).norm())
    for means, found in run(2, reduced):
        assert means == pytest.approx([mean] * (1 + LEAST_SAMPLES), rel=1e-5)
        assert len(found.reduced_us) == LEAST_SAMPLES and min(found.reduced_us) > 0

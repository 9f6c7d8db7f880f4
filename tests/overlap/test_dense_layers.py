"""When gradients of several ranks are ready, by a clock that is set by hand."""

from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.overlap.plans import WIDTH, make_model
from tests.processes import run
from torchrec_bls.overlap.dense_layers import LEAST_SAMPLES, DenseLayer, measure_layers

# Microseconds since the begin, of the layers from the last to the first.
READY = ((1000.0, 2000.0, 3000.0, 4000.0), (1500.0, 2100.0, 3000.0, 3900.0))


def measured(rank: int) -> list[DenseLayer]:
    of_parameters = [moment for moment in READY[rank] for _ in ("bias", "weight")]
    clock = "torchrec_bls.overlap.dense_layers._Clock.since_begin_us"
    with patch(clock, return_value=of_parameters):
        return measure_layers(make_model(), [torch.zeros(4, WIDTH)], dist.group.WORLD)


def test_a_layer_is_ready_when_the_last_rank_has_it() -> None:
    first, second = run(2, measured)
    assert first == second
    times = [layer.compute_us for layer in first]
    assert times == [(each,) * LEAST_SAMPLES for each in (1500.0, 600.0, 900.0, 1000.0)]
    assert [layer.parameters[0] for layer in first] == ["6.bias", "4.bias", "2.bias", "0.bias"]

"""Steps under DistributedDataParallel by hand."""

from __future__ import annotations

from torchrec_bls.sharding.simulation.data_parallel import Bucket, DenseSteps

from benchmarks.simulator.dense.model import Gradient, LayerTimes
from benchmarks.simulator.dense.steps import dense_steps
from tests.sharding.additive_costs import AdditiveTestCosts

COSTS = AdditiveTestCosts()
COSTS.all_reduce_us = 30.0  # and 2 for 1,000 bytes

# The last layer's gradient is ready after 8 us, in its bucket after 9.
_LAYERS = [
    LayerTimes(10.0, 20.0, (Gradient(10_000, 2.0, 3.0, 4.0), Gradient(5_000, 1.0, 1.0, 1.0))),
    LayerTimes(1.0, 2.0),
    LayerTimes(5.0, 6.0, (Gradient(10_000, 1.0, 2.0, 3.0),)),
]


def test_steps_by_hand() -> None:
    found = dense_steps(_LAYERS, 2, COSTS, first_bucket_bytes=1, bucket_bytes=2**20)
    assert found == DenseSteps(
        forward_us=16.0,
        # The last parameter's first: 5,000 bytes before 10,000.
        buckets=(Bucket(6.0 + 1.0, 50.0, 2.0), Bucket(22.0 + 1.0 + 2.0, 60.0, 4.0)),
        rest_us=0.0,
        optimizer_us=8.0,
    )
    assert dense_steps(_LAYERS, 1, COSTS) == DenseSteps(16.0, (), 28.0, 8.0)
    before = [LayerTimes(1.0, 7.0), *_LAYERS]
    assert dense_steps(before, 2, COSTS).rest_us == 7.0

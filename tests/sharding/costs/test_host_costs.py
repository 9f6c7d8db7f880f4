"""Host costs of a profile: which are taken for a job, and their interval."""

import math

import pytest
from torchrec_bls.sharding.costs.host_costs import HostCosts
from torchrec_bls.sharding.costs.profiled import ProfiledCosts

from tests.sharding.synthetic import small_profile

COSTS = ProfiledCosts(small_profile())


@pytest.mark.parametrize(
    ("ranks", "ranks_per_core", "taken"),
    # Measured on 2 cores: 2 ranks had a core each, 4 shared them.
    [(2, 1.0, 2), (128, 1.0, 2), (4, 2.0, 4), (2, 2.0, 4), (64, 8.0, 4)],
)
def test_host_costs_are_of_ranks_that_shared_cores_alike(
    ranks: int, ranks_per_core: float, taken: int
) -> None:
    model = COSTS.host("bls", True, ranks, ranks_per_core)
    assert model is not None
    assert model.world_size == taken


def test_what_was_not_measured_has_none() -> None:
    assert COSTS.host("gloo", True, 2, 1.0) is None


def test_the_interval_by_hand() -> None:
    model = COSTS.host("bls", False, 2, 1.0)
    assert model is not None
    estimate = model.interval(1000.0)
    assert estimate.microseconds == 1000.0
    assert (estimate.low, estimate.high) == (1000 * math.exp(-0.1), 1000 * math.exp(0.2))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_costs_that_can_not_be(value: float) -> None:
    with pytest.raises(ValueError, match="host costs have group = "):
        HostCosts(group=value)

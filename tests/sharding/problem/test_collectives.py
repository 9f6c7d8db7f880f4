"""How embeddings are exchanged, against TorchRec's collectives counted by hand."""

import pytest
from torchrec_bls.sharding.problem.collectives import Collective, way_of
from torchrec_bls.sharding.problem.exchange_costs import exchanges_of
from torchrec_bls.sharding.problem.tables import (
    COLUMN_WISE,
    ROW_WISE,
    SHARDING_TYPES,
    TABLE_ROW_WISE,
    TABLE_WISE,
    Table,
    UniformReuse,
    Workload,
)

from tests.sharding.additive_costs import AdditiveTestCosts, roomy

COSTS = AdditiveTestCosts()
TWO_HOSTS = {"ranks_per_host": 4}


def of(way: tuple[Collective, ...]) -> list[tuple[bool, int, int, int]]:
    return [(each.reduces, each.ranks, each.host_ranks, each.destinations) for each in way]


@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
@pytest.mark.parametrize("pooled", [True, False])
def test_channels_have_one_all_to_all(sharding_type: str, pooled: bool) -> None:
    way = way_of(roomy(8, backend="bls", **TWO_HOSTS), sharding_type, pooled)
    assert of(way.forward) == of(way.backward) == [(False, 8, 4, 8)]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(
    ("sharding_type", "pooled"),
    [(TABLE_WISE, True), (COLUMN_WISE, True), (ROW_WISE, False), (TABLE_ROW_WISE, False)],
)
def test_what_needs_no_sums_goes_all_to_all(backend: str, sharding_type: str, pooled: bool) -> None:
    way = way_of(roomy(8, backend=backend, **TWO_HOSTS), sharding_type, pooled)
    assert of(way.forward) == of(way.backward) == [(False, 8, 4, 8)]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_partial_sums_are_reduced_and_gradients_gathered(backend: str) -> None:
    job = roomy(8, backend=backend, **TWO_HOSTS)
    reduces = backend == "gloo"
    of_all = way_of(job, ROW_WISE, True)
    assert of(of_all.forward) == [(reduces, 8, 4, 8)]
    assert of(of_all.backward) == [(False, 8, 4, 8)]
    # The 4 ranks of a host sum the samples of all 8; then sums go to one rank of the other host.
    of_host = way_of(job, TABLE_ROW_WISE, True)
    assert of(of_host.forward) == [(reduces, 4, 4, 8), (False, 2, 1, 2)]
    assert of(of_host.backward) == [(False, 2, 1, 2), (False, 4, 4, 8)]


def test_inference_has_no_gradients_and_a_rank_alone_no_exchange() -> None:
    assert way_of(roomy(4, backend="gloo", training=False), ROW_WISE, True).backward == ()
    assert way_of(roomy(1, backend="gloo"), ROW_WISE, True).collectives == ()


def test_costs_of_a_byte_and_constants() -> None:
    """COSTS: an all-to-all is 30 us and a us for 1,000 bytes, an all-reduce 50 us and 2 us."""
    job = roomy(8, backend="gloo", **TWO_HOSTS)
    workload = Workload([Table("t", 1000, 64)], {"t": UniformReuse(1000, 3.0)})
    exchanges = exchanges_of(workload, job, COSTS)
    expected = {
        TABLE_WISE: (2 * 30, 2 * 8),
        ROW_WISE: (50 + 30, 2 * 8 + 8),
        TABLE_ROW_WISE: (50 + 30 + 2 * 30, 2 * 8 + 8 + 2 * 2),
    }
    for sharding_type, (constant, per_thousand) in expected.items():
        way = way_of(job, sharding_type, True)
        assert exchanges.embeddings[way].constant == pytest.approx(constant)
        assert exchanges.embeddings[way].per_byte == pytest.approx(per_thousand / 1000)
        assert exchanges.constant(way) == pytest.approx(3 * 30 + constant)

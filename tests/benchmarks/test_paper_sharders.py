"""The sharders of Table III on tables small enough to place by hand."""

import pytest
from torchrec_bls.sharding.problem.tables import Table, UniformReuse, Workload

from benchmarks.simulator.sharders import TABLE_III, table_iii_plan
from tests.sharding.additive_costs import roomy

# (rows E, columns D, pooling L)
SHAPES = [(1000, 16, 2.0), (100, 64, 4.0), (10_000, 16, 1.0), (10, 16, 3.0), (200, 32, 1.0)]
TABLES = [Table(f"t{index}", rows, dim) for index, (rows, dim, _) in enumerate(SHAPES)]
WORKLOAD = Workload(
    TABLES, {f"t{index}": UniformReuse(rows, ids) for index, (rows, _, ids) in enumerate(SHAPES)}
)


@pytest.mark.parametrize(
    ("sharder", "ranks"),
    [
        ("naive", [0, 1, 0, 1, 0]),
        # E: 10,000 | 1,000, 200, 100, 10
        ("size_greedy", [1, 1, 0, 1, 1]),
        # L D: 32, 256, 16, 48, 32: 256 | 48, 32, 32, 16
        ("lookup_greedy", [1, 0, 1, 1, 1]),
        # L / E: 0.002, 0.04, 0.0001, 0.3, 0.005: 0.3 | all others
        ("norm_lookup_greedy", [1, 1, 1, 0, 1]),
        # L D log10 E: 96, 512, 64, 48, 73.6: 512 | all others
        ("size_lookup_greedy", [1, 0, 1, 1, 1]),
    ],
)
def test_by_hand(sharder: str, ranks: list[int]) -> None:
    plan = table_iii_plan(sharder, WORKLOAD, roomy(2))
    assert [placed.shards[0].rank for placed in plan] == ranks


def test_random_follows_its_seed() -> None:
    plans = [table_iii_plan("random", WORKLOAD, roomy(4), seed) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    assert len(TABLE_III) == 6
    with pytest.raises(ValueError, match="no sharder 'best'"):
        table_iii_plan("best", WORKLOAD, roomy(2))

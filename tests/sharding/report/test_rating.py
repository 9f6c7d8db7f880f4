"""Ratings against sums done by hand."""

import pytest
from torchrec_bls.sharding.problem.job import Job
from torchrec_bls.sharding.problem.tables import (
    COLUMN_WISE,
    ROW_WISE,
    TABLE_ROW_WISE,
    TABLE_WISE,
    PlacedShard,
    PlacedTable,
    Table,
    UniformReuse,
    Workload,
)
from torchrec_bls.sharding.report.prediction import rate

from tests.sharding.additive_costs import AdditiveTestCosts

COSTS = AdditiveTestCosts()
TABLE = Table("t", 1000, 64)
WORKLOAD = Workload([TABLE], {"t": UniformReuse(1000, 3.0)})
# 10 samples on each of 2 ranks: 20 x 3 ids x 64 columns / 1,000 and 1 for the shard.
WHOLE_US = 1 + 3.84
# From each rank 10 x (3 ids x 8 bytes + a length of 4).
IDS = 280
# To each rank 10 x 64 float32.
ROWS = 2560


def job(**others: object) -> Job:
    return Job(2, 10, [1 << 30] * 2, **others)  # type: ignore[arg-type]


def test_table_wise() -> None:
    plan = [PlacedTable(TABLE, TABLE_WISE, (PlacedShard(1, 1000, 64),))]
    rating = rate(plan, WORKLOAD, job(), COSTS)
    phases = {name: time.microseconds for name, time in rating.phases.items()}
    assert phases == pytest.approx(
        {
            "ids": 30 + 2 * IDS / 1000,
            "forward": 20 + WHOLE_US,
            "embeddings": 2 * (30 + 2 * ROWS / 1000),
            "backward": 20 + 2 * WHOLE_US,
        }
    )
    assert rating.step.microseconds == pytest.approx(sum(phases.values()))
    assert rating.step.low == pytest.approx(0.8 * rating.step.microseconds)
    idle, busy = rating.ranks
    assert (idle.shards, idle.compute.microseconds) == (0, 0.0)
    # Ids and embeddings of one iteration, and gradients, from and for both ranks.
    assert busy.shard_bytes == 1000 * 64 * 4 + 2 * (IDS + ROWS + ROWS)
    # Embeddings and gradients of the own samples.
    assert busy.result_bytes == idle.result_bytes == 2 * ROWS
    # 3 channels, each 2 ranks x 2 slots of the least size.
    assert busy.slot_bytes == pytest.approx(3 * 2 * 2 * (16384 + 192))
    assert rate(plan, WORKLOAD, job(backend="gloo"), COSTS).ranks[1].slot_bytes == 0


def test_ids_go_three_times_over_gloo() -> None:
    plan = [PlacedTable(TABLE, TABLE_WISE, (PlacedShard(1, 1000, 64),))]
    phases = rate(plan, WORKLOAD, job(backend="gloo"), COSTS).phases
    assert phases["ids"].microseconds == pytest.approx(3 * 30 + 2 * IDS / 1000)
    assert phases["embeddings"].microseconds == pytest.approx(2 * (30 + 2 * ROWS / 1000))


def test_column_wise_sends_ids_twice_and_embeddings_in_halves() -> None:
    shards = (PlacedShard(0, 1000, 32), PlacedShard(1, 1000, 32, 0, 32))
    rating = rate([PlacedTable(TABLE, COLUMN_WISE, shards)], WORKLOAD, job(), COSTS)
    assert rating.phases["ids"].microseconds == pytest.approx(30 + 2 * IDS / 1000)
    assert rating.phases["embeddings"].microseconds == pytest.approx(2 * (30 + ROWS / 1000))
    assert rating.phases["forward"].microseconds == pytest.approx(20 + 1 + 1.92)


def test_row_wise_halves_ids_and_sends_partial_sums() -> None:
    shards = (PlacedShard(0, 500, 64), PlacedShard(1, 500, 64, 500))
    rating = rate([PlacedTable(TABLE, ROW_WISE, shards)], WORKLOAD, job(), COSTS)
    assert rating.phases["ids"].microseconds == pytest.approx(30 + 2 * 10 * (12 + 4) / 1000)
    assert rating.phases["embeddings"].microseconds == pytest.approx(2 * (30 + 2 * ROWS / 1000))


def test_row_wise_over_gloo_is_an_all_reduce_and_an_all_gather() -> None:
    shards = (PlacedShard(0, 500, 64), PlacedShard(1, 500, 64, 500))
    plan = [PlacedTable(TABLE, ROW_WISE, shards)]
    both = rate(plan, WORKLOAD, job(backend="gloo"), COSTS).phases["embeddings"]
    # Either rank has partial sums of both ranks' samples.
    assert both.microseconds == pytest.approx((50 + 2 * 2 * ROWS / 1000) + (30 + 2 * ROWS / 1000))
    assert both.low == pytest.approx(0.8 * both.microseconds)
    forward = rate(plan, WORKLOAD, job(backend="gloo", training=False), COSTS).phases["embeddings"]
    assert forward.microseconds == pytest.approx(50 + 2 * 2 * ROWS / 1000)


def test_table_row_wise_over_gloo_is_reduced_on_its_host_and_sent_across() -> None:
    four = Job(4, 10, [1 << 30] * 4, ranks_per_host=2, backend="gloo", training=False)
    shards = (PlacedShard(2, 500, 64), PlacedShard(3, 500, 64, 500))
    plan = [PlacedTable(TABLE, TABLE_ROW_WISE, shards)]
    # The ranks of the host that has it: partial sums of 4 ranks' samples, then sums of 2.
    expected = (50 + 2 * 4 * ROWS / 1000) + (30 + 2 * ROWS / 1000)
    phases = rate(plan, WORKLOAD, four, COSTS).phases
    assert phases["embeddings"].microseconds == pytest.approx(expected)


def test_exchanges_of_several_ways_share_a_phase() -> None:
    """The rank with most in all decides, and each way has its constants."""
    other = Table("u", 1000, 64)
    workload = Workload([TABLE, other], {"t": UniformReuse(1000, 3.0), "u": UniformReuse(1000)})
    by_rows = (PlacedShard(0, 500, 64), PlacedShard(1, 500, 64, 500))
    plan = [
        PlacedTable(TABLE, ROW_WISE, by_rows),
        PlacedTable(other, TABLE_WISE, (PlacedShard(0, 1000, 64),)),
    ]
    phases = rate(plan, workload, job(backend="gloo"), COSTS).phases
    expected = (50 + 30 + 3 * 2 * ROWS / 1000) + 2 * (30 + 2 * ROWS / 1000)
    assert phases["embeddings"].microseconds == pytest.approx(expected)


def test_bounded_lag_has_the_slowest_ranks_sum_and_more_slots() -> None:
    plan = [PlacedTable(TABLE, TABLE_WISE, (PlacedShard(1, 1000, 64),))]
    rating = rate(plan, WORKLOAD, job(bound=2, training=False), COSTS)
    whole = 30 + 2 * IDS / 1000 + 20 + WHOLE_US + 30 + 2 * ROWS / 1000
    assert rating.step.microseconds == pytest.approx(whole)
    assert rating.ranks[1].slot_bytes == pytest.approx(2 * 2 * 6 * (16384 + 192))
    assert rating.ranks[1].shard_bytes == 1000 * 64 * 4 + 3 * 2 * (IDS + ROWS)


def test_ranks_that_share_a_core_take_turns() -> None:
    tables = [Table(f"t{index}", 1000, 64) for index in range(2)]
    workload = Workload(tables, {table.name: UniformReuse(1000, 3.0) for table in tables})
    plan = [
        PlacedTable(table, TABLE_WISE, (PlacedShard(rank, 1000, 64),))
        for rank, table in enumerate(tables)
    ]
    alone = rate(plan, workload, job(), COSTS).phases["forward"].microseconds
    shared = rate(plan, workload, job(cores_per_host=1), COSTS).phases["forward"].microseconds
    assert shared == pytest.approx(2 * alone)


def test_two_ways_of_sharding_are_two_exchanges_and_two_ops() -> None:
    other = Table("u", 1000, 64)
    workload = Workload([TABLE, other], {"t": UniformReuse(1000, 3.0), "u": UniformReuse(1000)})
    whole = PlacedTable(TABLE, TABLE_WISE, (PlacedShard(0, 1000, 64),))
    as_whole = PlacedTable(other, TABLE_WISE, (PlacedShard(0, 1000, 64),))
    by_column = PlacedTable(other, COLUMN_WISE, (PlacedShard(0, 1000, 64),))
    one = rate([whole, as_whole], workload, job(), COSTS).step.microseconds
    two = rate([whole, by_column], workload, job(), COSTS).step.microseconds
    assert two == pytest.approx(one + 3 * 30 + 2 * 20)

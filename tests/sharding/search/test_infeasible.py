"""Problems without a plan: the error names what binds, and by how much."""

import pytest
from torchrec_bls.sharding.problem.job import Job
from torchrec_bls.sharding.problem.options import make_problem
from torchrec_bls.sharding.problem.tables import COLUMN_WISE, ROW_WISE, TABLE_WISE, Table, Workload
from torchrec_bls.sharding.search.infeasible import InfeasiblePlanError
from torchrec_bls.sharding.search.search import search

from tests.sharding.additive_costs import AdditiveTestCosts

COSTS = AdditiveTestCosts()
MIB = 1 << 20


def refused(tables: list[Table], job: Job) -> InfeasiblePlanError:
    with pytest.raises(InfeasiblePlanError) as caught:
        search(make_problem(Workload(tables), job, COSTS))
    return caught.value


def whole(name: str, mib: int) -> Table:
    return Table(name, mib * MIB // 64, 16, sharding_types=(TABLE_WISE,))


def test_table_larger_than_any_rank() -> None:
    job = Job(2, 1, [10 * MIB, 12 * MIB], backend="gloo")
    error = refused([whole("small", 1), whole("large", 15)], job)
    assert "DDR of the largest rank: a shard of table 'large' (table_wise, which" in str(error)
    assert "short by 3.00 MiB" in str(error)
    assert error.short_by == pytest.approx(3 * MIB, rel=1e-3)


def test_table_whose_blocks_are_larger_than_the_smallest_rank() -> None:
    # Whole it lacks 5 MiB on the rank of 10, by rows 2.5 MiB on the rank of 5.
    job = Job(2, 1, [10 * MIB, 5 * MIB], backend="gloo")
    table = Table("t", 15 * MIB // 64, 16, sharding_types=(TABLE_WISE, ROW_WISE))
    error = refused([table], job)
    assert "DDR of the smallest rank: a shard of table 't' (row_wise" in str(error)
    assert error.short_by == pytest.approx(2.5 * MIB, rel=1e-3)


def test_all_ranks_together() -> None:
    job = Job(2, 1, [10 * MIB] * 2, backend="gloo", memory_kind="HBM")
    error = refused([whole(f"t{index}", 6) for index in range(4)], job)
    assert "HBM of all ranks together: the 4 tables" in str(error)
    assert error.short_by == pytest.approx(4 * MIB, rel=1e-3)


def test_packing() -> None:
    # In all there is room for 3 x 6 of 20, but one rank would need 12 of 10.
    job = Job(2, 1, [10 * MIB] * 2, backend="gloo")
    error = refused([whole(f"t{index}", 6) for index in range(3)], job)
    assert "no plan was found that fits: DDR of single ranks: the tables fit in all" in str(error)
    # Two are placed, and 4 of 10 MiB are free beside each.
    assert "has no room for 1 of them" in str(error)
    assert error.short_by == pytest.approx(2 * MIB, rel=1e-2)
    # Split by rows they fit.
    split = Table("t0", 6 * MIB // 64, 16, sharding_types=(ROW_WISE,))
    found = search(make_problem(Workload([split, whole("t1", 6), whole("t2", 6)]), job, COSTS))
    assert {placed.table.name for placed in found.plan} == {"t0", "t1", "t2"}


def unpooled(name: str, module: str, kib: int, **others: object) -> Table:
    types = (COLUMN_WISE,)
    rows = kib * 1024 // 256
    return Table(name, rows, 64, module, pooled=False, sharding_types=types, **others)  # type: ignore[arg-type]


def test_each_collection_has_a_width_of_its_own() -> None:
    # The first one's table is larger than a rank, the second one's can't be split.
    job = Job(2, 1, [10 * MIB] * 2, backend="gloo")
    tables = [unpooled("a", "one", 12 << 10), unpooled("b", "two", 1 << 10, min_columns=64)]
    found = search(make_problem(Workload(tables), job, COSTS))
    assert [placed.shards[0].columns for placed in found.plan] == [32, 64]
    together = [unpooled("a", "one", 12 << 10), unpooled("b", "one", 1 << 10, min_columns=64)]
    error = refused(together, job)
    assert "DDR of the largest rank: a shard of table 'a' (64 columns, the common width" in str(
        error
    )
    assert error.short_by == pytest.approx(2 * MIB, rel=1e-2)


def test_more_shards_than_ranks_with_room_for_them() -> None:
    job = Job(3, 1, [12 * MIB, 12 * MIB, MIB], backend="gloo")
    table = Table("t", 30 * MIB // 192, 48, sharding_types=(COLUMN_WISE,))
    error = refused([table], job)
    assert "DDR of the 2 largest ranks: a shard of table 't' (column_wise" in str(error)
    assert error.short_by == pytest.approx(3 * MIB, rel=1e-2)


def test_slots_of_the_channels() -> None:
    # 3 channels x 8 ranks x 2 slots x at least 16 KiB are 768 KiB.
    table = Table("t", 1000, 16)
    assert search(make_problem(Workload([table]), Job(8, 1, [MIB] * 8), COSTS)).plan
    error = refused([table], Job(8, 1, [MIB // 2] * 8))
    assert "results and slots" in str(error)
    search(make_problem(Workload([table]), Job(8, 1, [MIB // 2] * 8, backend="gloo"), COSTS))


def test_slots_in_the_memory_of_the_host() -> None:
    job = Job(8, 1, [MIB] * 8, host_memory_bytes=[MIB // 2] * 8, memory_kind="HBM")
    error = refused([Table("t", 1000, 16)], job)
    assert "DDR of one rank: the slots of the bounded-lag channels" in str(error)

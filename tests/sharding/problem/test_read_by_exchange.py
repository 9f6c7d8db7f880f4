"""Which lookups an exchange does by itself: the cost model's answer, and the sharded modules'."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torchrec_bls.sharding.problem.options import make_problem
from torchrec_bls.sharding.problem.plan_groups import groups_of
from torchrec_bls.sharding.problem.shard_traffic import read_by_exchange
from torchrec_bls.sharding.problem.tables import (
    COLUMN_WISE,
    ROW_WISE,
    TABLE_WISE,
    PlacedShard,
    PlacedTable,
    Table,
    Workload,
)

from tests.distributed.models import EC, WEIGHTED, Batch, Kind, arrived, make_ids, shard
from tests.processes import run
from tests.sharding.additive_costs import AdditiveTestCosts, roomy
from torchrec_bls import BLSConfig, _native

TYPES = (TABLE_WISE, ROW_WISE, COLUMN_WISE)
INFERENCE = roomy(2, backend="bls", training=False)
TRAINING = roomy(2, backend="bls")


@contextlib.contextmanager
def count_readings() -> Iterator[list[str]]:
    found: list[str] = []
    with contextlib.ExitStack() as stack:
        for name in ("post_table_rows", "post_pooled_rows"):
            real = getattr(_native, name)

            def read(*arguments: object, name: str = name, real: object = real) -> None:
                found.append(name)
                real(*arguments)  # type: ignore[operator]

            stack.enter_context(mock.patch.object(_native, name, read))
        yield found


def look_up(rank: int, kind: Kind) -> None:
    table = Table("t", 50, 8, pooled=kind.name != "ec")
    for sharding_type in TYPES:
        model = shard(kind, sharding_type, kind.bls_sharder(BLSConfig()))
        for job in (TRAINING, INFERENCE):
            with count_readings() as readings, torch.set_grad_enabled(job.training):
                arrived(model(Batch(make_ids(kind, 3 + rank, 4))))
            expected = read_by_exchange(table, job, sharding_type)
            assert bool(readings) == expected, (sharding_type, job.training)


@pytest.mark.parametrize("kind", [EC, WEIGHTED], ids=lambda kind: kind.name)
def test_sharded_modules_read_as_the_cost_model_says(kind: Kind) -> None:
    run(2, look_up, kind)


def test_half_floats_and_process_groups_go_through_fbgemm() -> None:
    table = Table("t", 50, 8)
    assert read_by_exchange(table, INFERENCE, TABLE_WISE)
    assert not read_by_exchange(Table("t", 50, 8, weight_bytes=2), INFERENCE, TABLE_WISE)
    gloo = roomy(2, backend="gloo", training=False)
    assert not read_by_exchange(table, gloo, TABLE_WISE)


def test_one_column_wise_table_takes_its_module_to_fbgemm() -> None:
    tables = [
        Table("a", 50, 8, module="ec", pooled=False),
        Table("b", 50, 8, module="ec", pooled=False),
        Table("c", 50, 8, module="other", pooled=False),
    ]
    workload = Workload(tables)
    plan = [
        PlacedTable(table, sharding_type, (PlacedShard(0, 50, 8),))
        for table, sharding_type in zip(tables, (COLUMN_WISE, TABLE_WISE, TABLE_WISE), strict=True)
    ]
    found = {
        (group.module, group.sharding_type): work.by_exchange
        for group in groups_of(plan, workload, INFERENCE)
        for works in group.works[0].values()
        for work in works
    }
    assert found == {
        ("ec", COLUMN_WISE): False,
        ("ec", TABLE_WISE): False,
        ("other", TABLE_WISE): True,
    }


def test_options_of_the_planner_know() -> None:
    workload = Workload([Table("t", 1000, 256, pooled=False)])
    problem = make_problem(workload, INFERENCE, AdditiveTestCosts())
    found = {
        (option.sharding_type, traffic.lookup.by_exchange)
        for option, traffic in zip(problem.options, problem.traffic, strict=True)
    }
    assert found == {(TABLE_WISE, True), (ROW_WISE, True), (COLUMN_WISE, False)}

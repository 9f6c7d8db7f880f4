"""Plans in files: what was written is read, and what is no plan is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrec.distributed.planner.types import Topology
from torchrec.distributed.types import ParameterSharding, ShardingPlan
from torchrec_bls.sharding import load_plan, save_plan
from torchrec_bls.sharding.problem import plan_file
from torchrec_bls.sharding.problem.job import Job
from torchrec_bls.sharding.problem.options import options_of
from torchrec_bls.sharding.problem.plan_file import PlanFileError, read_plan
from torchrec_bls.sharding.problem.tables import SHARDING_TYPES, TABLE_ROW_WISE, PlacedTable, Table
from torchrec_bls.sharding.torchrec.plan import to_sharding_plan

RANKS = 4
JOB = Job(RANKS, 8, [1 << 30] * RANKS, ranks_per_host=2)


@st.composite
def placed_tables(draw: Any) -> list[PlacedTable]:
    placed = []
    for number in range(draw(st.integers(1, 4))):
        rows, dim = draw(st.integers(1, 1000)), 4 * draw(st.integers(1, 64))
        table = Table(
            f"t{number}",
            rows,
            dim,
            draw(st.sampled_from(["", "ebc", "a.b"])),
            sharding_types=SHARDING_TYPES,
            min_columns=4,
        )
        option = draw(st.sampled_from(options_of(number, table, JOB)))
        ranks = draw(st.permutations(range(RANKS)))[: option.shards]
        if option.sharding_type == TABLE_ROW_WISE:
            host = draw(st.integers(0, 1))
            ranks = [2 * host, 2 * host + 1]
        placed.append(option.placed(table, ranks))
    return placed


@given(placed_tables())
def test_what_was_written_is_read(tmp_path_factory: Any, plan: list[PlacedTable]) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan_file.save_plan(path, plan, RANKS, 2)
    saved = read_plan(path)
    assert saved.ranks == RANKS
    assert list(saved.of([placed.table for placed in plan], "it")) == plan


@given(placed_tables())
def test_torchrecs_plans_are_kept(tmp_path_factory: Any, plan: list[PlacedTable]) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    topology = Topology(RANKS, "cpu", local_world_size=2)
    theirs = to_sharding_plan(plan, topology)
    save_plan(theirs, path, world_size=RANKS)
    assert load_plan(path, topology) == theirs


TABLE = {
    "module": "ebc",
    "name": "t",
    "rows": 10,
    "dim": 8,
    "sharding_type": "row_wise",
    "shards": [
        {"rank": 0, "rows": 5, "columns": 8, "row_offset": 0, "column_offset": 0},
        {"rank": 1, "rows": 5, "columns": 8, "row_offset": 5, "column_offset": 0},
    ],
}
PLAN = {"format": "torchrec-bls plan", "version": 1, "ranks": 2, "tables": [TABLE]}


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_plan_by_hand(tmp_path: Path) -> None:
    saved = read_plan(written(tmp_path / "plan.json", PLAN))
    assert [(s.rank, s.row_offset) for s in saved.tables[0].shards] == [(0, 0), (1, 5)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("plan", "is no JSON"),
        ([], "is not a torchrec-bls plan: plan again, and save it with"),
        ({**PLAN, "format": "profile"}, "is not a torchrec-bls plan"),
        ({**PLAN, "version": 2}, "has version 2, and this package reads 1"),
        ({**PLAN, "ranks": 0}, "ranks: expected int >= 1, got 0: plan again"),
        ({**PLAN, "ranks": True}, "ranks: expected int, got True"),
        ({**PLAN, "tables": []}, r"tables: expected array of length >= 1, got \[\]"),
        ({**PLAN, "tables": [TABLE, TABLE]}, "plans a table twice"),
        ({**PLAN, "ranks": 1}, "'ebc.t' has a shard on rank 1, of 1 ranks"),
        ({**PLAN, "tables": [7]}, r"tables\[0\]: expected object, got 7"),
    ],
)
def test_files_that_hold_no_plan(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(PlanFileError, match=message):
        read_plan(written(tmp_path / "plan.json", content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sharding_type": "diagonal"}, "sharding type 'diagonal' is none of"),
        ({"shards": 7}, r"tables\[0\].shards: expected array, got 7"),
        ({"shards": [7]}, r"tables\[0\].shards\[0\]: expected object, got 7"),
        ({"shards": TABLE["shards"][:1]}, "do not make up its 10 rows of 8 columns"),
        ({"shards": [TABLE["shards"][0]] * 2}, "do not make up"),
        ({"rows": 11}, "do not make up its 11 rows"),
        ({"rows": 10.0}, r"tables\[0\].rows: expected int, got 10.0"),
        ({"rows": -10}, "rows: expected int >= 1, got -10"),
        ({"colour": 1}, "'colour' is unknown"),
    ],
)
def test_tables_that_are_none(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = written(tmp_path / "plan.json", {**PLAN, "tables": [{**TABLE, **change}]})
    with pytest.raises(PlanFileError, match=message):
        read_plan(path)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "it plans table 'ebc.t' and 0 more that the model does not have"),
        ([Table("t", 10, 8, "ebc"), Table("u", 10, 8, "ebc")], "says nothing of table 'ebc.u'"),
        ([Table("t", 10, 16, "ebc")], "of 10 x 8, and the model's has 10 x 16"),
    ],
)
def test_other_tables_than_the_plans(tmp_path: Path, tables: list[Table], message: str) -> None:
    saved = read_plan(written(tmp_path / "plan.json", PLAN))
    with pytest.raises(PlanFileError, match=message):
        saved.of(tables, "it")


def test_other_ranks_than_the_plans(tmp_path: Path) -> None:
    path = written(tmp_path / "plan.json", PLAN)
    with pytest.raises(PlanFileError, match="is a plan for 2 ranks, but there are 4"):
        load_plan(path, Topology(4, "cpu"))


def of_host(ranks: list[int], hosts: dict[str, int]) -> dict[str, Any]:
    """A plan for 4 ranks, with a table in rows of the host of some ranks."""
    shard = TABLE["shards"][0]
    rows = 60 // len(ranks)
    shards = [
        {**shard, "rank": rank, "rows": rows, "row_offset": rows * number}
        for number, rank in enumerate(ranks)
    ]
    table = {**TABLE, "rows": 60, "sharding_type": "table_row_wise", "shards": shards}
    return {**PLAN, "ranks": 4, **hosts, "tables": [table]}


@pytest.mark.parametrize(
    ("content", "per_host", "message"),
    [
        # All that can be told of files of before is where such tables are.
        (of_host([0, 1, 2, 3], {}), 4, None),
        (of_host([2, 3], {}), 2, None),
        (of_host([0, 1, 2, 3], {}), 2, "in rows of one host, on ranks .0, 1, 2, 3., but there are"),
        (of_host([2, 3], {}), 4, "on ranks .2, 3., but there are 1 host of 4 ranks"),
        (of_host([1, 2], {}), 2, "on ranks .1, 2., but there are 2 hosts of 2 ranks: plan again"),
        (of_host([2, 3], {"ranks_per_host": 2}), 2, None),
        (
            of_host([0, 1, 2, 3], {"ranks_per_host": 4}),
            2,
            "is a plan for 1 host of 4 ranks, but there are 2 hosts of 2 ranks: plan again",
        ),
        ({**PLAN, "ranks": 4}, 2, None),
        ({**PLAN, "ranks": 4, "ranks_per_host": 1}, 4, "4 hosts of 1 ranks, but there are 1 host"),
        ({**PLAN, "ranks": 4, "ranks_per_host": 3}, 4, "4 ranks do not fill hosts of 3"),
    ],
)
def test_other_hosts_than_the_plans(
    tmp_path: Path, content: dict[str, Any], per_host: int, message: str | None
) -> None:
    path = written(tmp_path / "plan.json", content)
    topology = Topology(4, "cpu", local_world_size=per_host)
    if message is None:
        assert load_plan(path, topology).plan
        return
    with pytest.raises(PlanFileError, match=message):
        load_plan(path, topology)


def test_torchrecs_plan_says_its_hosts_where_that_matters(tmp_path: Path) -> None:
    topology = Topology(4, "cpu", local_world_size=2)
    for content, per_host in ((of_host([2, 3], {}), 2), ({**PLAN, "ranks": 4}, None)):
        plan = load_plan(written(tmp_path / "plan.json", content), topology)
        save_plan(plan, tmp_path / "again.json", world_size=4)
        assert read_plan(tmp_path / "again.json").ranks_per_host == per_host


def test_tables_that_nobody_exchanges_are_refused(tmp_path: Path) -> None:
    replicated: Any = {"ebc": {"t": ParameterSharding("data_parallel", "dense", [0, 1])}}
    with pytest.raises(ValueError, match="table 't' is sharded data_parallel"):
        save_plan(ShardingPlan(replicated), tmp_path / "plan.json", world_size=2)

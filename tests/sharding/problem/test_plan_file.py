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
from torchrec_bls.sharding.problem.tables import SHARDING_TYPES, PlacedTable, Table
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
        placed.append(option.placed(table, ranks))
    return placed


@given(placed_tables())
def test_what_was_written_is_read(tmp_path_factory: Any, plan: list[PlacedTable]) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan_file.save_plan(path, plan, RANKS)
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
        ("plan", "is not JSON"),
        ([], "is not a torchrec-bls plan: make one with"),
        ({**PLAN, "format": "profile"}, "is not a torchrec-bls plan"),
        ({**PLAN, "version": 2}, "has version 2, and this package reads 1"),
        ({**PLAN, "ranks": 0}, "lacks ranks or tables"),
        ({**PLAN, "ranks": True}, "lacks ranks or tables"),
        ({**PLAN, "tables": []}, "lacks ranks or tables"),
        ({**PLAN, "tables": [TABLE, TABLE]}, "plans a table twice"),
        ({**PLAN, "ranks": 1}, "'ebc.t' has a shard on rank 1, of 1 ranks"),
        ({**PLAN, "tables": [7]}, "table number 0: must be an object of module, name"),
    ],
)
def test_files_that_hold_no_plan(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(PlanFileError, match=message):
        read_plan(written(tmp_path / "plan.json", content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sharding_type": "diagonal"}, "sharding type 'diagonal' is none of"),
        ({"shards": 7}, "shards must be a list"),
        ({"shards": [7]}, "a shard must be an object of column_offset"),
        ({"shards": TABLE["shards"][:1]}, "do not make up its 10 rows of 8 columns"),
        ({"shards": [TABLE["shards"][0]] * 2}, "do not make up"),
        ({"rows": 11}, "do not make up its 11 rows"),
        ({"rows": 10.0}, "must be whole numbers"),
        ({"rows": -10}, "must be whole numbers, not negative"),
        ({"colour": 1}, "must be an object of module"),
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
    with pytest.raises(PlanFileError, match="is a plan for 2 ranks, and the topology has 4"):
        load_plan(path, Topology(4, "cpu"))


def test_tables_that_nobody_exchanges_are_refused(tmp_path: Path) -> None:
    replicated: Any = {"ebc": {"t": ParameterSharding("data_parallel", "dense", [0, 1])}}
    with pytest.raises(ValueError, match="table 't' is sharded data_parallel"):
        save_plan(ShardingPlan(replicated), tmp_path / "plan.json", world_size=2)

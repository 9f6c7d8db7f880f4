"""Drawn models keep within their ranges, and their statistics are those of their ids."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from torchrec_bls.sharding.calibration.step_models import (
    BATCHES,
    ModelRanges,
    StepModel,
    draw_step_model,
    plans_by_hand,
)
from torchrec_bls.sharding.problem.tables import COLUMN_WISE, ROW_WISE, TABLE_WISE

RANGES = ModelRanges(
    collections=3,
    tables=(2, 9),
    rows=(50, 5000),
    dims=(8, 24),
    pooling=(2, 5),
    sequence=(1, 3),
    batch=(8, 32),
    weights_bytes=2**20,
    elements=20_000,
)


@given(number=st.integers(0, 1000))
def test_models_are_within_their_ranges(number: int) -> None:
    model = draw_step_model("model", (5, number), RANGES)
    assert model == draw_step_model("model", (5, number), RANGES)
    assert StepModel.from_json(json.loads(json.dumps(model.as_json()))) == model
    assert 1 <= len(model.collections) <= 3
    assert 2 <= len(model.tables) <= 9
    assert 1 <= model.batch <= 32
    weights = elements = 0.0
    for _, pooled, table in model.tables:
        assert 8 <= table.rows <= 5000
        assert table.dim in RANGES.dims
        low, high = RANGES.pooling if pooled else RANGES.sequence
        assert low <= table.pooling <= high
        weights += 4 * table.rows * table.dim
        elements += model.batch * table.pooling * table.dim
    assert weights <= 2**20 * 1.01
    assert elements <= 20_000
    for collection in model.collections:
        assert collection.pooled or len({table.dim for table in collection.tables}) == 1


def test_statistics_are_those_of_the_ids() -> None:
    model = draw_step_model("model", (5, 3), RANGES)
    workload = model.workload(2)
    assert [table.module for table in workload.tables] == [module for module, _, _ in model.tables]
    for number, table in enumerate(workload.tables):
        looked_up = different = 0
        for batch in range(BATCHES):
            of_ranks = [model.ids(rank, batch)[number] for rank in range(2)]
            for lengths, ids in of_ranks:
                assert len(lengths) == model.batch
                assert lengths.sum() == len(ids)
                looked_up += len(ids)
            different += len(np.unique(np.concatenate([ids for _, ids in of_ranks])))
        reuse = workload.reuse_of(table)
        assert reuse.pooling_factor * BATCHES * 2 * model.batch == looked_up
        assert reuse.unique_rows(2 * model.batch) * BATCHES == different


@given(number=st.integers(0, 1000), ranks=st.integers(2, 4))
def test_plans_by_hand_place_every_row_and_column_once(number: int, ranks: int) -> None:
    model = draw_step_model("model", (5, number), RANGES)
    workload, job = model.workload(ranks), model.job(ranks, 2, "bls", training=True)
    plans = plans_by_hand(workload, job)
    assert {placed.sharding_type for placed in plans[TABLE_WISE]} == {TABLE_WISE}
    assert {placed.sharding_type for placed in plans[ROW_WISE]} == {ROW_WISE}
    assert {placed.sharding_type for placed in plans["mixed"]} <= {
        TABLE_WISE,
        COLUMN_WISE,
        ROW_WISE,
    }
    for plan in plans.values():
        assert [placed.table for placed in plan] == list(workload.tables)
        for placed in plan:
            there = np.zeros((placed.table.rows, placed.table.dim), int)
            for shard in placed.shards:
                rows = slice(shard.row_offset, shard.row_offset + shard.rows)
                columns = slice(shard.column_offset, shard.column_offset + shard.columns)
                there[rows, columns] += 1
                assert 0 <= shard.rank < ranks
            assert (there == 1).all()

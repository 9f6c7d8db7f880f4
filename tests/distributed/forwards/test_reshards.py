"""A forward that fails right after the model got another plan, with which the ranks meet again."""

from typing import Any

import pytest
import torch

from tests.distributed import models
from tests.distributed.forwards.cells import cell
from tests.distributed.pipeline.test_torchrec_pipelines import sharded
from tests.distributed.test_reshard import MOVES, batch_of, by_key, new_plan, reshard
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import BLSConfig

KIND = models.EBC


@torch.no_grad()
def fail_after_a_reshard(rank: int, world_size: int, lookup: str) -> None:
    sharder = KIND.bls_sharder(BLSConfig(deadline=60, lookup=lookup))
    model = sharded(KIND, "table_wise", sharder)

    def check(step: int) -> None:
        batch = batch_of(KIND, rank, step)
        wanted = KIND.module()(batch.sparse_features)
        torch.testing.assert_close(by_key(model(batch)[1]), by_key(wanted))

    check(0)
    for turn, move in enumerate(["two tables", "all to one rank", "two tables", "all tables"]):
        with cell(move, turn):
            reshard(model, new_plan(KIND, MOVES[move]))
            bad: Any = batch_of(KIND, rank, 1)
            if turn % 2:
                bad.sparse_features = torch.zeros(1)
            else:
                bad = None
            if rank == turn % world_size:
                with pytest.raises(ValueError if turn % 2 else AttributeError):
                    model(bad)
            else:
                check(1)
            check(2)


@pytest.mark.parametrize(
    ("world_size", "lookup"),
    slow_but([(2, "exchange")], [(2, "exchange"), (3, "exchange"), (2, "auto"), (3, "direct")]),
)
def test_a_first_forward_by_another_plan_fails_on_one_rank(world_size: int, lookup: str) -> None:
    run(world_size, fail_after_a_reshard, world_size, lookup)

import os
import time
from collections.abc import Iterator

import pytest
from torchrec_bls.sharding.calibration.processes import RankError, run_ranks


def counting(rank: int, world_size: int, most: int) -> Iterator[tuple[int, int]]:
    for i in range(most):
        yield rank, i


def failing(rank: int, world_size: int, how: str) -> Iterator[int]:
    yield 1
    if rank == 1:
        if how == "raises":
            raise ValueError("no more")
        os._exit(3)
    time.sleep(60)


def test_yields_what_rank_0_does() -> None:
    assert list(run_ranks(counting, 2, 3, deadline_seconds=60)) == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize(("how", "message"), [("raises", "no more"), ("dies", "rank 1 died")])
def test_a_rank_that_fails_ends_them_all(how: str, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=message):
        list(run_ranks(failing, 2, how, deadline_seconds=50))
    assert time.monotonic() - start < 45


def test_a_rank_that_hangs() -> None:
    with pytest.raises(RankError, match=r"did not end in 3 s"):
        list(run_ranks(failing, 1, "", deadline_seconds=3))

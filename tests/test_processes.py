"""The harness that runs ranks as processes: its own failures have to be found by tests."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.processes import RanksFailedError, run, run_outcomes


def add_up(rank: int, addend: int) -> torch.Tensor:
    value = torch.tensor([rank + addend])
    dist.all_reduce(value)
    return value


def fail_on(rank: int, failing: int) -> int:
    if rank == failing:
        raise KeyError("no such row")
    return rank


def kill_itself(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def hang(rank: int) -> None:
    if rank == 0:
        time.sleep(3600)


def test_ranks_share_a_process_group_and_return_by_rank() -> None:
    assert run(3, add_up, 10) == [torch.tensor([33])] * 3


def test_a_rank_that_raises_is_reported_with_its_traceback() -> None:
    with pytest.raises(RanksFailedError) as raised:
        run(2, fail_on, 1)
    assert "rank 1 raised KeyError: 'no such row'" in str(raised.value)
    assert 'raise KeyError("no such row")' in str(raised.value)
    assert [outcome.rank for outcome in raised.value.failed] == [1]


def test_a_rank_that_dies_is_reported_and_does_not_harm_the_next_run() -> None:
    outcomes = run_outcomes(2, kill_itself)
    assert outcomes[1].error == "ProcessDied"  # and perhaps before rank 0 was connected to it
    assert outcomes[1].message == "exit code -9"
    assert run(2, fail_on, 2) == [0, 1]


def test_a_rank_that_hangs_is_killed_at_the_deadline() -> None:
    assert [outcome.error for outcome in run_outcomes(2, hang, deadline=5)] == [
        "DeadlinePassed",
        None,
    ]

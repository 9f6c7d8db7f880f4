"""A failing rank is named, and takes the others with it."""

import os
import signal
import time
from pathlib import Path

import pytest
from demo.processes import RankFailure, run_ranks


def write_rank(rank: int, folder: Path, text: str) -> None:
    (folder / f"{rank}").write_text(text)


def fail_late_at_one(rank: int, folder: Path) -> None:
    """Ranks 0 and 2 fail because rank 1 does, and report it before rank 1 has."""
    if rank == 1:
        time.sleep(0.5)
        raise KeyError("the cause")
    raise ConnectionError("peer gone")


def kill_rank_one(rank: int, folder: Path) -> None:
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def exit_at_rank_zero(rank: int, folder: Path) -> None:
    if rank == 0:
        os._exit(7)


def is_connection_error(error: Exception) -> bool:
    return isinstance(error, ConnectionError)


def test_all_ranks_run(tmp_path: Path) -> None:
    run_ranks(write_rank, 3, tmp_path, "done")
    assert [(tmp_path / f"{rank}").read_text() for rank in range(3)] == ["done"] * 3


def test_the_cause_is_named_not_its_consequences(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 1 failed with KeyError: 'the cause'\nTraceback"):
        run_ranks(fail_late_at_one, 3, tmp_path, is_consequence=is_connection_error)


def test_a_killed_rank_is_named_and_the_others_are_stopped(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 1 was killed by SIGKILL"):
        run_ranks(kill_rank_one, 2, tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid0").read_text()), 0)


def test_an_exit_code_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 0 ended with exit code 7"):
        run_ranks(exit_at_rank_zero, 2, tmp_path)

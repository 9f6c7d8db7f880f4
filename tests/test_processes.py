"""The launcher of ranks: its own failures have to be found by tests."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.synchronize import Semaphore
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.processes import run, run_outcomes
from tests.tiers import slow_but
from torchrec_bls import processes
from torchrec_bls.errors import PoisonedError
from torchrec_bls.lifetime import When, at_exit
from torchrec_bls.processes import RanksFailedError

DEADLINE_S = 60.0


def add_up(rank: int, addend: int) -> torch.Tensor:
    value = torch.tensor([rank + addend])
    dist.all_reduce(value)
    return value


def fail_on(rank: int, failing: int) -> int:
    if rank == failing:
        raise KeyError("no such row")
    return rank


def kill_itself(rank: int) -> None:
    dist.barrier()  # or rank 0 may have ended before rank 1 is connected to it
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def hang(rank: int) -> None:
    if rank == 0:
        time.sleep(3600)


def fail_late_at_one(rank: int) -> None:
    """Ranks 0 and 2 fail because rank 1 does, and report it before rank 1 has."""
    if rank == 1:
        time.sleep(0.5)
        raise KeyError("the cause")
    raise PoisonedError("peer gone")


def kill_rank_one(rank: int, folder: Path) -> None:
    (folder / f"{rank}").write_text(str(os.getpid()))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


def exit_at_rank_zero(rank: int) -> None:
    if rank == 0:
        os._exit(7)


def note_the_end(rank: int, folder: Path) -> None:
    """Notes each phase of the rank's end in its order, and raises in one of them on rank 1."""
    for when in reversed(When):
        at_exit(when)(partial(_note, folder / str(rank), when.name))
    if rank == 1:
        at_exit(When.CHANNELS)(partial(fail_on, rank, 1))


def _note(path: Path, phase: str) -> None:
    with path.open("a") as file:
        print(phase, file=file)


def crash_on_the_way_out(rank: int) -> int:
    if rank == 1:
        sys.exit = lambda code: os.kill(os.getpid(), signal.SIGSEGV)  # type: ignore[assignment]
    return rank


def fill(rank: int, values: torch.Tensor) -> float:
    values += rank
    return values.sum().item()


def wait_for_one(rank: int, semaphore: Semaphore) -> None:
    if rank == 0:
        assert semaphore.acquire(timeout=DEADLINE_S)
    else:
        semaphore.release()


def counting(rank: int, most: int) -> Iterator[tuple[int, int]]:
    for i in range(most):
        yield rank, i


def failing(rank: int, how: str) -> Iterator[int]:
    yield 1
    if rank == 1:
        if how == "raises":
            raise ValueError("no more")
        os._exit(3)
    time.sleep(3600)


def note_and_hang(rank: int, folder: Path) -> None:
    (folder / f"{rank}.tmp").write_text(str(os.getpid()))
    (folder / f"{rank}.tmp").rename(folder / f"{rank}")
    time.sleep(3600)


def is_running(pid: int) -> bool:
    """Whether there is such a process; one that has ended may be left for nobody to collect."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def wait_until_gone(pids: list[int]) -> None:
    end = time.monotonic() + DEADLINE_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < end, pids
        time.sleep(0.01)


@pytest.mark.smoke
def test_ranks_share_a_process_group_and_return_by_rank() -> None:
    assert run(3, add_up, 10) == [torch.tensor([33])] * 3


@pytest.mark.parametrize(
    "method", slow_but(["forkserver", "fork"], ["forkserver", "spawn", "fork"])
)
def test_ranks_without_a_process_group(method: str) -> None:
    results = processes.run(2, fail_on, 2, deadline_s=DEADLINE_S, start_method=method)
    assert results == [0, 1]


def test_every_rank_has_tensors_of_its_own() -> None:
    values = torch.zeros(3)
    assert processes.run(3, fill, values, deadline_s=DEADLINE_S) == [0.0, 3.0, 6.0]
    assert values.sum() == 0


def test_semaphores_are_shared() -> None:
    semaphore = get_context("spawn").Semaphore(0)
    processes.run(2, wait_for_one, semaphore, deadline_s=DEADLINE_S)


def test_a_rank_that_raises_is_reported_with_its_traceback() -> None:
    with pytest.raises(RanksFailedError) as raised:
        run(2, fail_on, 1)
    assert "rank 1 failed with KeyError: 'no such row'\nTraceback" in str(raised.value)
    assert 'raise KeyError("no such row")' in str(raised.value)
    assert [outcome.rank for outcome in raised.value.failed] == [1]


def test_the_cause_is_named_before_its_consequences() -> None:
    with pytest.raises(RanksFailedError, match=r"^rank 1 failed with KeyError: 'the cause'") as it:
        processes.run(3, fail_late_at_one, deadline_s=DEADLINE_S)
    assert it.value.failed[0].rank == 1
    assert "rank 0 failed with PoisonedError: peer gone" in str(it.value)
    assert "rank 2 failed with PoisonedError: peer gone" in str(it.value)


def test_a_killed_rank_is_named_and_the_others_are_stopped(tmp_path: Path) -> None:
    with pytest.raises(
        RanksFailedError, match=r"^rank 1 was killed by SIGKILL\nrank 0 did not end"
    ):
        processes.run(2, kill_rank_one, tmp_path, deadline_s=DEADLINE_S)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "0").read_text()), 0)


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_all_that_ends_with_a_rank_ends_in_its_order(tmp_path: Path, method: str) -> None:
    returned, failed = processes.outcomes(
        2, note_the_end, tmp_path, deadline_s=DEADLINE_S, start_method=method
    )
    assert (returned.exit_code, failed.exit_code) == (0, 1)
    phases = [when.name for when in When]
    assert [(tmp_path / name).read_text().split() for name in "01"] == [phases, phases]


def test_an_exit_code_is_named() -> None:
    with pytest.raises(RanksFailedError, match=r"^rank 0 ended with exit code 7$"):
        processes.run(2, exit_at_rank_zero, deadline_s=DEADLINE_S)


def test_a_crash_after_the_result_is_a_failure() -> None:
    with pytest.raises(RanksFailedError, match=r"^rank 1 returned 1 and was killed by SIGSEGV$"):
        processes.run(2, crash_on_the_way_out, deadline_s=DEADLINE_S)


def test_a_rank_that_dies_is_reported_and_does_not_harm_the_next_run() -> None:
    outcomes = run_outcomes(2, kill_itself)
    assert outcomes[1].error == "ProcessDied"
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert run(2, fail_on, 2) == [0, 1]


def test_a_rank_that_hangs_is_killed_at_the_deadline() -> None:
    run(2, fail_on, 2)  # the server of processes is there afterwards, and has its imports
    outcomes = run_outcomes(2, hang, deadline=5)
    assert [outcome.error for outcome in outcomes] == ["DeadlinePassed", None]
    assert str(outcomes[0]) == "rank 0 did not end in 5 s: killed, its stacks are on stderr"


def test_the_stacks_of_a_rank_that_hangs_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    # Forked, it writes to this process's stderr and not to that of the server.
    processes.outcomes(1, hang, deadline_s=3, start_method="fork")
    assert "in hang" in capfd.readouterr().err


def test_a_stream_yields_what_rank_0_does() -> None:
    items = processes.stream(2, counting, 3, deadline_s=DEADLINE_S)
    assert list(items) == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize(
    ("how", "message"),
    slow_but(
        [("dies", "rank 1 ended with exit code")],
        [("raises", "ValueError: no more"), ("dies", "rank 1 ended with exit code")],
    ),
)
def test_a_rank_that_fails_ends_a_stream(how: str, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailedError, match=message):
        list(processes.stream(2, failing, how, deadline_s=DEADLINE_S))
    assert time.monotonic() - start < DEADLINE_S * 3 / 4


@pytest.mark.slow
def test_a_rank_that_hangs_ends_a_stream() -> None:
    with pytest.raises(RanksFailedError, match=r"rank 0 did not end in 2 s"):
        list(processes.stream(1, failing, "", deadline_s=2))


def test_a_stream_that_nobody_reads_on_leaves_no_process(tmp_path: Path) -> None:
    items = processes.stream(2, noting, tmp_path, deadline_s=DEADLINE_S)
    pid = next(items)
    items.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def noting(rank: int, folder: Path) -> Iterator[int]:
    yield os.getpid()
    time.sleep(3600)


# Python calls such functions within a fork, and drops what is raised in them.
INTERRUPTED_FORK = """
import os, signal
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
"""

CALLER = """
import signal
import sys
from pathlib import Path
from tests.test_processes import note_and_hang
from torchrec_bls.processes import run
if __name__ == "__main__":
    # Programs in the background of a script are started to ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run(2, note_and_hang, Path(sys.argv[1]), deadline_s=600, start_method=sys.argv[2])
"""


def test_an_interrupt_amid_a_fork_is_not_lost(tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(INTERRUPTED_FORK + CALLER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    caller = subprocess.run(
        [sys.executable, script, tmp_path, "fork"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert caller.returncode != 0
    assert "KeyboardInterrupt" in caller.stderr
    assert "Exception ignored" not in caller.stderr


@pytest.mark.parametrize(
    "method",
    slow_but(["forkserver"], ["forkserver", "spawn", "fork"]),
)
@pytest.mark.parametrize("sent", slow_but([signal.SIGKILL], [signal.SIGINT, signal.SIGKILL]))
def test_no_rank_is_left_when_the_caller_is_ended(
    tmp_path: Path, sent: signal.Signals, method: str
) -> None:
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    caller = subprocess.Popen(
        [sys.executable, script, tmp_path, method], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + DEADLINE_S
        while not all((tmp_path / name).exists() for name in "01"):
            assert caller.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        caller.send_signal(sent)
        assert caller.wait(DEADLINE_S) != 0
    finally:
        caller.kill()
    wait_until_gone([int((tmp_path / name).read_text()) for name in "01"])

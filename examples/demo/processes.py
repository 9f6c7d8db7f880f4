"""Running one process a rank, and saying which rank failed first."""

from __future__ import annotations

import json
import math
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

GRACE_SECONDS = 2.0


class RankFailure(RuntimeError):
    """A rank failed; the message names it and holds its traceback."""


def run_ranks(
    work: Callable[..., None],
    ranks: int,
    folder: Path,
    *arguments: Any,
    is_consequence: Callable[[Exception], bool] | None = None,
) -> None:
    """Runs ``work(rank, folder, *arguments)`` in a fresh process for each rank.

    When one fails, the others get two seconds to end by themselves and are then stopped.

    Args:
        work: importable function.
        ranks: number of processes.
        folder: where the ranks leave their reports; must be empty.
        *arguments: passed on, picklable.
        is_consequence: tells the errors that a rank gets because another one has failed, so that
            the message names the origin; importable.

    Raises:
        RankFailure: a rank raised or was killed.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(
            target=_guard, args=(work, rank, folder, arguments, is_consequence), daemon=True
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        _wait_for(processes)
        exit_codes = [process.exitcode for process in processes]
    finally:
        _stop(processes)
    if any(exit_codes):
        raise RankFailure(_origin(exit_codes, folder))


def _wait_for(processes: list[BaseProcess]) -> None:
    """Waits until all have ended, or until the grace after the first failure is over."""
    deadline = math.inf
    while (
        running := [process for process in processes if process.exitcode is None]
    ) and time.monotonic() < deadline:
        failed = any(process.exitcode for process in processes)
        if failed and deadline == math.inf:
            deadline = time.monotonic() + GRACE_SECONDS
        wait([process.sentinel for process in running], GRACE_SECONDS if failed else None)


def _guard(
    work: Callable[..., None],
    rank: int,
    folder: Path,
    arguments: tuple[Any, ...],
    is_consequence: Callable[[Exception], bool] | None,
) -> None:
    try:
        work(rank, folder, *arguments)
    except Exception as error:
        report = {
            "time": time.monotonic(),
            "consequence": is_consequence is not None and is_consequence(error),
            "message": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
        _report_path(folder, rank).write_text(json.dumps(report))
        raise SystemExit(1) from None


def _stop(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    for process in processes:
        if process.pid is not None:
            process.join(GRACE_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


def _report_path(folder: Path, rank: int) -> Path:
    return folder / f"failure-of-rank-{rank}.json"


def _origin(exit_codes: list[int | None], folder: Path) -> str:
    for rank, code in enumerate(exit_codes):
        if code is not None and code < 0:
            return f"rank {rank} was killed by {signal.Signals(-code).name}"
    reports = []
    for rank, code in enumerate(exit_codes):
        path = _report_path(folder, rank)
        if path.exists():
            report = json.loads(path.read_text())
            reports.append((report["consequence"], report["time"], rank, report))
        elif code:
            return f"rank {rank} ended with exit code {code}"
    *_, rank, report = min(reports, key=lambda entry: entry[:3])
    return f"rank {rank} failed with {report['message']}\n{report['traceback']}"

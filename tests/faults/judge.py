"""Plays a row and finds what did not go as the row says."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from tests.faults.plays import play
from tests.faults.row import Row
from tests.processes import DEFAULT_DEADLINE, run_outcomes
from torchrec_bls.processes import Outcome

# Moments at which ranks agree about what is to be; no message has a sequence number there.
_BEFORE_MESSAGES = ("create", "reshard")
# What a rank of a channel says of itself, whatever it raises.
_HERE = r"channel '[^']+' on rank {}, sequence \d+, lag \d+: "


@dataclass(frozen=True)
class Verdict:
    """What became of a row.

    Attributes:
        row: that was played.
        outcomes: of the ranks.
        seconds: from the fault to the error of each survivor, by rank.
        problems: in what it differs from the row; empty if it is as it should be.
    """

    row: Row
    outcomes: list[Outcome]
    seconds: dict[int, float]
    problems: list[str]


def examine(row: Row) -> Verdict:
    """Plays `row` with real processes."""
    with TemporaryDirectory() as name, _store_if(row.own_store, Path(name)):
        folder = Path(name)
        outcomes = run_outcomes(
            row.world,
            play,
            row,
            folder,
            deadline=DEFAULT_DEADLINE + row.deadline,
            fresh_interpreters=row.fresh_interpreters,
        )
        seconds = _seconds_to_the_end(row, folder)
    problems = [
        *_struck_rank(row, outcomes[row.rank]),
        *problems_of_survivors(row, outcomes, seconds),
    ]
    return Verdict(row, outcomes, seconds, problems)


def _serve_store(folder: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (folder / "store pid").write_text(str(os.getpid()))
    (folder / "store port.tmp").write_text(str(store.port))
    (folder / "store port.tmp").rename(folder / "store port")
    time.sleep(timedelta(minutes=5).total_seconds())


@contextmanager
def _store_if(wanted: bool, folder: Path) -> Iterator[None]:
    if not wanted:
        yield
        return
    process = get_context("forkserver").Process(target=_serve_store, args=(folder,))
    process.start()
    try:
        while not (folder / "store port").exists():
            assert process.is_alive(), "the store did not start"
            time.sleep(0.01)
        yield
    finally:
        process.kill()
        process.join()


def _seconds_to_the_end(row: Row, folder: Path) -> dict[int, float]:
    struck = folder / "struck"
    if not struck.exists():
        return {}
    ends: dict[int, Any] = {
        rank: (folder / f"end of {rank}").read_text() for rank in range(row.world)
    }
    return {
        rank: float(end) - float(struck.read_text())
        for rank, end in ends.items()
        if end and rank != row.rank
    }


def _struck_rank(row: Row, outcome: Outcome) -> Iterator[str]:
    if outcome.error not in (row.end if isinstance(row.end, tuple) else (row.end,)):
        yield f"the struck rank should end with {row.end}, but {outcome}"
    if outcome.exit_code != row.exit_code:
        yield f"the struck rank's exit code is {outcome.exit_code}, not {row.exit_code}"
    for words in row.words_of_struck:
        if words not in outcome.message:
            yield f"the struck rank does not say '{words}': {outcome.message}"
    if (outcome.error == "RendezvousError" and row.moment not in _BEFORE_MESSAGES) and not re.match(
        _HERE.format(outcome.rank), outcome.message
    ):
        yield f"the struck rank does not say rank, sequence and lag: {outcome.message}"


def problems_of_survivors(
    row: Row, outcomes: list[Outcome], seconds: dict[int, float]
) -> Iterator[str]:
    """Returns in what the survivors differ from the row.

    Args:
        row: that was played.
        outcomes: by rank.
        seconds: from the fault to the end of each survivor, by rank.
    """
    survivors = [outcome for outcome in outcomes if outcome.rank != row.rank]
    if not seconds:
        yield f"the fault did not strike rank {row.rank}"
    for outcome in survivors:
        if not row.errors:
            if outcome.error is not None or outcome.exit_code != 0:
                yield f"nothing should have happened, but {outcome}"
            continue
        yield from _survivor(row, outcome)
        if outcome.rank not in seconds:
            yield f"rank {outcome.rank} noted no time of its end"
        elif seconds[outcome.rank] > row.limit:
            yield f"rank {outcome.rank} took {seconds[outcome.rank]:.2f} s, not {row.limit} s"
    if row.errors and row.end != "PipelineError":
        raised = {outcome.error for outcome in outcomes}
        if not raised & set(row.errors):
            yield f"somebody should raise one of {row.errors}, but they raised {raised}"


def _survivor(row: Row, outcome: Outcome) -> Iterator[str]:
    text = outcome.message
    if outcome.error not in (*row.errors, "PoisonedError"):
        yield f"rank {outcome.rank} should raise one of {row.errors}, but {outcome}"
    if outcome.exit_code != 1:
        yield f"rank {outcome.rank}'s exit code is {outcome.exit_code}, not 1"
    if outcome.error != "RendezvousError" or row.moment not in _BEFORE_MESSAGES:
        if not re.match(_HERE.format(outcome.rank), text):
            yield f"rank {outcome.rank} does not say rank, sequence and lag: {text}"
        if f"rank {row.rank}" not in text:
            yield f"rank {outcome.rank} does not name rank {row.rank}: {text}"
    if outcome.error == "PoisonedError" and not re.search(r"because rank \d+ failed: ", text):
        yield f"rank {outcome.rank} does not name the origin of the poison: {text}"
    for words in row.words:
        if words not in text:
            yield f"rank {outcome.rank} does not say '{words}': {text}"

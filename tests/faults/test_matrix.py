"""Every row of the fault matrix goes as it says, with real processes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import tests.faults.__main__ as report
from tests.faults.faults import Kill
from tests.faults.judge import examine, problems_of_survivors
from tests.faults.matrix import MATRIX
from tests.faults.row import LARGE, Row
from torchrec_bls.processes import Outcome

SMOKE = "SIGKILL before post, 2 ranks"
# They wait for seconds, and rows like them wait less.
LONG = {
    "interpreter shutdown with posts outstanding",
    "interpreter shutdown with posts outstanding and a thread in wait",
    "SIGSTOP longer than the deadline",
    "SIGSTOP between post and wait",
    "SIGSTOP longer than the deadline, in an all-reduce",
    "SIGKILL before a reshard",
    "older message replayed",
}


def kind_of(row: Row) -> tuple[object, ...]:
    """What rows have in common of which one plays in `make test`."""
    transport = dict(row.arguments).get("transport")
    is_large = row.items == LARGE
    return type(row.fault), row.errors, row.end_of_request, row.play, is_large, transport


def slow_rows() -> set[str]:
    """All but the first of each kind. Over TCP, under which the protocol is the same, a rank is
    killed and nothing else."""
    slow, kinds = set(LONG), set()
    for row in MATRIX:
        over_tcp = ("transport", "tcp") in row.arguments
        if over_tcp and not isinstance(row.fault, Kill):
            slow.add(row.name)
        elif row.name not in slow:
            if kind_of(row) in kinds:
                slow.add(row.name)
            kinds.add(kind_of(row))
    return slow


SLOW = slow_rows()


def tier_of(row: Row) -> list[pytest.MarkDecorator]:
    if row.name == SMOKE:
        return [pytest.mark.smoke]
    return [pytest.mark.slow] if row.name in SLOW else []


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=tier_of(row), id=row.name) for row in MATRIX]
)
def test_fault(row: Row) -> None:
    verdict = examine(row)
    assert not verdict.problems, "\n".join(verdict.problems)


def test_names_are_unique() -> None:
    names = [row.name for row in MATRIX]
    assert LONG | {SMOKE} < set(names)
    assert SMOKE not in SLOW
    assert len(set(names)) == len(names)


def test_a_row_that_goes_otherwise_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = next(row for row in MATRIX if row.name == SMOKE)
    wrong = replace(row, words=("of boredom",), exit_code=0, within=0.0)
    monkeypatch.setattr(report, "MATRIX", [row, wrong])
    assert report.main(["--out", str(tmp_path)]) == 1
    good, bad = json.loads((tmp_path / "faults.json").read_text())["rows"]
    assert good["passed"] and good["ends"][0]["error"] == "PeerDiedError"
    assert not bad["passed"]
    printed = capsys.readouterr().out
    for problem in ("does not say 'of boredom'", "exit code is -9, not 0", "not 0.0 s"):
        assert problem in printed


def test_a_survivor_without_time_or_place_is_reported() -> None:
    row = next(row for row in MATRIX if row.name == "address fd 0x100000")
    texts = {rank: f"rank 1 {' '.join(row.words)}" for rank in (0, 2)}
    outcomes = [
        Outcome(0, error="RendezvousError", message=texts[0], exit_code=1),
        Outcome(1, error="PoisonedError", exit_code=1),
        Outcome(2, error="RendezvousError", message=texts[2], exit_code=1),
    ]
    problems = list(problems_of_survivors(row, outcomes, {0: 0.1}))
    assert problems == [
        f"rank 0 does not say rank, sequence and lag: {texts[0]}",
        f"rank 2 does not say rank, sequence and lag: {texts[2]}",
        "rank 2 noted no time of its end",
    ]

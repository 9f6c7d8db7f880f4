"""`torchrec-bls plan` on files good and bad."""

import io
import json
import sys
from pathlib import Path

import pytest
from torchrec_bls.sharding.problem.model_file import read_model
from torchrec_bls.sharding.problem.tables import UniformReuse

from tests.sharding.command_files import TABLES, files, run_on
from torchrec_bls.cli.main import run

__all__ = ["files"]  # a fixture


def plan(files: Path, *others: str, ranks: int = 2) -> int:
    return run_on(files, "plan", "--backend", "gloo", *others, ranks=ranks)


def test_prints_and_writes(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = [f"--{kind}={files / f'plan.{kind}'}" for kind in ("json", "html", "png")]
    (files / "measured.json").write_text('{"step": 5000}')
    assert plan(files, *out, f"--measured={files / 'measured.json'}") == 0
    text = capsys.readouterr().out
    assert "Plan for 2 ranks" in text and "users" in text and "measured" in text
    record = json.loads((files / "plan.json").read_text())
    assert [decision["table"] for decision in record["decisions"]] == ["users", "items"]
    assert (files / "plan.html").stat().st_size > 1000
    assert (files / "plan.png").stat().st_size > 1000


class Screen(io.StringIO):
    """What a person sees, or a file."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]


def test_progress_is_for_those_who_look(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, file = Screen(True), Screen(False)
    for screen in (terminal, file):
        monkeypatch.setattr(sys, "stderr", screen)
        assert plan(files) == 0
    assert "placing tables" in terminal.getvalue() and "improving plans" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")  # nothing is left of it
    assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "there are no tables"),
        (
            [{"name": "t", "rows": 0, "dim": 4}],
            "json: tables[0].rows: expected int >= 1, got 0",
        ),
        ([{"name": "t", "rows": 9}], "model.json: tables[0]: 'dim' is missing"),
        ([{"name": "t", "rows": 9, "dim": "4"}], "tables[0].dim: expected int, got '4'"),
        ([{"name": "t", "rows": 9, "dim": 4, "colour": 1}], "tables[0]: 'colour' is unknown"),
        ([TABLES[0], TABLES[0]], "there twice"),
        ([{**TABLES[0], "pooling_factor": -1}], "pooling_factor: expected float >= 0.0, got -1"),
        ([{**TABLES[0], "unique_rows": 7}], "unique_rows: expected object, got 7"),
        (
            [{**TABLES[0], "unique_rows": {"64": 0}}],
            "unique_rows['64']: expected float > 0",
        ),
        ([{**TABLES[0], "unique_rows": {}}], "but all of it must be positive"),
        ([{**TABLES[0], "unique_rows": {"many": 9}}], "could not convert"),
        ([{**TABLES[0], "rows": 2**62}], "take more than"),
        ([{**TABLES[0], "rows": 2**70}], "tables[0].rows: expected int <= "),
        ([{**TABLES[0], "sharding_types": ["diagonal"]}], "chooses among"),
        ([{**TABLES[0], "rows": 10**9, "sharding_types": ["table_wise"]}], "short by"),
    ],
)
def test_bad_models_are_named(
    files: Path, tables: list[object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "model.json").write_text(json.dumps({"tables": tables}))
    assert plan(files) == 1
    assert message in capsys.readouterr().err


def test_bad_files(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "model.json").write_text("tables")
    assert plan(files) == 1
    assert "is no JSON" in capsys.readouterr().err
    assert run(["plan", "--model", "none.json", "--profile", "none.json", "--ranks", "2"]) == 1
    assert "none.json" in capsys.readouterr().err


def test_missing_statistics_are_said(files: Path) -> None:
    tables = [{key: TABLES[0][key] for key in ("name", "rows", "dim")}]
    (files / "model.json").write_text(json.dumps({"tables": tables}))
    with pytest.warns(UserWarning, match="no pooling_factor for 1 of 1 tables, the first 'users'"):
        assert plan(files) == 0


def test_unique_rows_are_the_tables_statistics(files: Path) -> None:
    counted = {**TABLES[0], "unique_rows": {"64": 40, "256": 80}}
    (files / "model.json").write_text(json.dumps({"tables": [counted, TABLES[1]]}))
    workload = read_model(files / "model.json")
    users, items = (workload.reuse_of(table) for table in workload.tables)
    assert [users.unique_rows(samples) for samples in (64, 128, 256)] == pytest.approx(
        [40, 40 * 2**0.5, 80]
    )
    assert users.pooling_factor == 2.5
    assert items == UniformReuse(9000, 8.0)


@pytest.mark.parametrize("kind", ["json", "html", "png"])
def test_a_report_that_cannot_be_written(
    files: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(files, f"--{kind}={files / 'nowhere' / 'plan'}") == 1
    assert "nowhere" in capsys.readouterr().err


def test_a_figure_without_matplotlib(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plan(files, f"--png={files / 'plan.png'}") == 1
    assert "matplotlib" in capsys.readouterr().err

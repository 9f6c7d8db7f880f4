"""Which commit a record names, and whether it says that the checkout differs from it."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.harness import record


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.check_output(command, text=True).strip()


def test_changes_are_named_unless_they_are_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, of_another = tmp_path / "program.py", tmp_path / "benchmarks" / "results" / "x.json"
    of_another.parent.mkdir(parents=True)
    for path in (program, of_another):
        path.write_text("before")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "all")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    commit = git(tmp_path, "rev-parse", "--short=12", "HEAD")

    of_another.write_text("after")
    (tmp_path / "untracked.txt").write_text("")
    assert record.environment()["commit"] == commit
    program.write_text("after")
    assert record.environment()["commit"] == f"{commit} with local changes"


def test_a_folder_without_git_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert record.environment()["commit"] is None

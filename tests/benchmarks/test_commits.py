"""Two checkouts in turns: the ratios, and that they are two."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ROOT
from benchmarks.harness import commits

OLD, NEW = "/elsewhere/bin/python", sys.executable


def run(monkeypatch: pytest.MonkeyPatch, trees: dict[str, str], turns: int = 5) -> None:
    """Runs a comparison whose turns are made up: cell "b" takes 1.5 times as long as before."""

    def taken(name: str, python: str) -> dict[str, Any]:
        assert name == "subject.commits"
        return {"tree": trees[python], "cells": {"a": 2.0, "b": 3.0 if python == NEW else 2.0}}

    monkeypatch.setattr(commits, "_taken", taken)
    monkeypatch.setattr(commits, "_commit", lambda tree: f"commit of {tree}")
    monkeypatch.setattr(sys, "argv", ["commits", OLD, "--turns", str(turns)])
    commits.main("subject.commits", dict, "Compares.", "ms")


def test_ratios_are_new_by_old(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, {OLD: "/elsewhere", NEW: str(ROOT)})
    printed = capsys.readouterr().out
    assert "New by commit of /elsewhere; geometric mean 1.225" in printed
    assert "| a | 2 | 2 | 1.000 (1.000 to 1.000) |" in printed
    assert "| b | 2 | 3 | 1.500 (1.500 to 1.500) |" in printed


def test_one_checkout_is_not_compared_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="not those of two trees"):
        run(monkeypatch, {OLD: str(ROOT), NEW: str(ROOT)})


def test_a_turn_tells_its_tree_and_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["commits", "-"])
    commits.main("subject.commits", lambda: {"a": 1.5}, "Compares.", "ms")
    assert capsys.readouterr().out == f'{{"tree": "{ROOT}", "cells": {{"a": 1.5}}}}\n'


def test_a_turn_that_fails_ends_the_comparison_with_its_reason() -> None:
    with pytest.raises(SystemExit, match=r"No module named benchmarks\.nowhere"):
        commits._taken("nowhere", sys.executable)


def test_a_turn_loads_a_fresh_copy_of_the_native_code(tmp_path: Path) -> None:
    library = tmp_path / "_native.so"
    library.write_bytes(b"code")
    with library.open("rb") as loaded:
        commits._place_native_code(library)
        assert loaded.read() == b"code"  # of a process that had it already
        assert os.fstat(loaded.fileno()).st_ino != library.stat().st_ino
    assert library.read_bytes() == b"code"
    assert list(tmp_path.iterdir()) == [library]

"""Notebooks run, print what the page shows, and are paired with the files to download."""

import os
import sys
from pathlib import Path

import pytest

from tests.docs.notebooks import run, sources
from tests.docs.tutorials import missing_line
from tests.paths import ROOT

PAGES = sorted((ROOT / "docs" / "notebooks").glob("*.md"))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    cells = run(page, tmp_path)
    assert any(cell.expected for cell in cells)
    for cell in cells:
        assert missing_line(cell.expected, cell.printed) is None, cell.printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_download_is_the_page(page: Path) -> None:
    # `make notebooks` writes it.
    assert sources(page) == sources(page.with_suffix(".ipynb"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_download_has_no_outputs(page: Path) -> None:
    text = page.with_suffix(".ipynb").read_text()
    assert '"outputs": []' in text and '"output_type"' not in text

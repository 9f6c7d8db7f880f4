"""Pictures are those that their scripts draw."""

import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

FIGURES = ROOT / "docs" / "figures"


@pytest.mark.parametrize("picture", sorted(FIGURES.glob("*.svg")), ids=lambda path: path.stem)
def test_a_picture_is_what_its_script_draws(picture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FIGURES))
    script = picture.with_suffix(".py")
    names: dict[str, object] = {"__name__": "figure", "__file__": str(script)}
    exec(compile(script.read_text(), script, "exec"), names)
    assert str(names["drawing"]()) == picture.read_text()  # type: ignore[operator]
    sys.modules.pop("svg")

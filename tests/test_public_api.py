"""The public API is the one written down, and the text of it sees what changes."""

from typing import Any

import pytest

from tests.public_api import _OF_LATER, FILE, LATER, lines, lines_of_file
from torchrec_bls import BLSConfig, BoundedLagPipeline, CodecConfig, overlap


def test_the_public_api_is_the_one_written_down() -> None:
    """A change that is meant: python -m tests.public_api, and the changelog says it."""
    assert lines() == lines_of_file()


def test_names_that_only_later_torchrecs_have_are_written_down() -> None:
    later = [each for each in FILE.read_text().splitlines() if each.endswith(LATER)]
    assert {each.partition("(")[0] for each in later} == _OF_LATER


def progress(self: Any, dataloader_iter: Any, more: int = 0) -> None:
    """Does one thing more."""


@pytest.mark.parametrize(
    ("owner", "name", "after", "part"),
    [
        (BoundedLagPipeline, "progress", progress, "progress(dataloader_iter, more=0)"),
        (BoundedLagPipeline, "__init__", progress, "Pipeline(dataloader_iter, more=0): "),
        (BoundedLagPipeline, "more", progress, "more(dataloader_iter, more=0)"),
        (CodecConfig, "from_file", classmethod(progress), "from_file(dataloader_iter, more=0)"),
        (overlap.OverlapPlan, "register", progress, "register(dataloader_iter, more=0)"),
        (overlap, "load_plan", progress, "load_plan(self, dataloader_iter, more=0)"),
    ],
)
def test_a_changed_signature_changes_a_line(
    owner: Any, name: str, after: Any, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, after, raising=False)
    (changed,) = set(lines()) - set(lines_of_file())
    assert part in changed


def test_what_no_page_shows_is_not_public(monkeypatch: pytest.MonkeyPatch) -> None:
    before = lines()
    monkeypatch.setattr(BLSConfig, "_more", progress, raising=False)
    monkeypatch.setattr(CodecConfig, "more", progress, raising=False)
    assert lines() == before

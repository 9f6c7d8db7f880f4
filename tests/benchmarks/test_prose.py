"""Sentences of pages have the figures of the records."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import prose, results_pages

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def records() -> dict[str, Any]:
    return results_pages.load()


@pytest.mark.parametrize("page", prose.PAGES)
def test_a_page_says_what_its_records_say(page: str, records: dict[str, Any]) -> None:
    missing = prose.missing(page, (ROOT / page).read_text(), records)
    assert not missing, f"{page} should say: {missing}"


def test_another_record_needs_another_sentence(records: dict[str, Any]) -> None:
    page = "docs/results/overlap.md"
    text = (ROOT / page).read_text()
    late = {**records["late_wait"]}
    late["results"] = [{**each, "over": {"early": [0.4, 0.5, 0.6]}} for each in late["results"]]
    changed = {**records, "late_wait": late}
    assert prose.missing(page, text, changed) == ["It saves 50 % of a backward here"]
    assert len(prose.missing(page, "", records)) == len(list(prose.PAGES[page](records)))


def test_where_a_line_of_the_page_ends_does_not_matter(records: dict[str, Any]) -> None:
    (sentence,) = prose.PAGES["docs/results/delays.md"](records)
    broken = sentence.replace(" ", "\n  ")
    assert prose.missing("docs/results/delays.md", broken, records) == []

"""The links of all pages: those between files, and those to the Internet."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.paths import ROOT

PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
)
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_TARGET = re.compile(r"^\(([\w-]+)\)=$", re.MULTILINE)


def links_of(page: Path) -> Iterator[str]:
    """Yields the targets of a page's links, but for those in code."""
    for match in _LINK.finditer(re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text()))):
        yield match[1]


def anchors_of(page: Path) -> set[str]:
    """Returns the anchors of a page: its targets, and its headings as a forge names them."""
    text = _FENCE.sub("", page.read_text())
    slugs = [_slug(heading) for heading in _HEADING.findall(text)]
    counted: Counter[str] = Counter()
    anchors = set(_TARGET.findall(text))
    for slug in slugs:
        anchors.add(f"{slug}-{counted[slug]}" if counted[slug] else slug)
        counted[slug] += 1
    return anchors


def external() -> list[str]:
    """Returns all links to the Internet, each once."""
    return sorted({link for page in PAGES for link in links_of(page) if "://" in link})


def _slug(heading: str) -> str:
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")

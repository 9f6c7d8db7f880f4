"""Links between files lead to files and anchors; links to the Internet are well-formed.

Whether the Internet has them is not for a test: `make docs-links` asks it.
"""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.docs.links import PAGES, anchors_of, external, links_of
from tests.paths import ROOT


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_files_lead_to_anchors(page: Path) -> None:
    missing = []
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            missing.append(link)
    assert not missing


def test_sources_name_pages_that_are_there() -> None:
    sources = [
        path
        for folder in ("torchrec_bls", "sharding", "csrc")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".pyi", ".h", ".cpp")
    ]
    # A path that a line cuts in two is none.
    named = {name for path in sources for name in re.findall(r"\bdocs/[\w./-]*", path.read_text())}
    assert "docs/design/planner.md" in named
    assert [name for name in sorted(named) if not (ROOT / name.rstrip(".")).is_file()] == []


@pytest.mark.parametrize("link", external())
def test_an_external_link_is_well_formed(link: str) -> None:
    parts = urlsplit(link)
    assert parts.scheme == "https"
    assert parts.hostname is not None and "." in parts.hostname
    assert parts.username is None and parts.port is None
    assert link.isascii() and link == parts.geturl()


def test_anchors_are_those_of_a_forge(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Why S = 2(k + 1)\n(own)=\n## `a` and [b](c.md)\n```sh\n# no heading\n```\n"
        "## Twice\n## Twice\n[x](y.md) and `[no](z.md)`\n"
    )
    assert anchors_of(page) == {"why-s--2k--1", "own", "a-and-b", "twice", "twice-1"}
    assert list(links_of(page)) == ["c.md", "y.md"]

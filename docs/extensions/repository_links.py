"""Links from pages to files outside of docs/, and from docstrings to pages.

Pages link to each other and to sources by relative paths, so that they work in a checkout. The site
has a page for each source that is linked, under files/, and shows the repository's own pages
(CONTRIBUTING.md and the like) in the place of stubs. Docstrings name pages by their paths.
"""

import html
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.application import Sphinx
from sphinx.highlighting import PygmentsBridge

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
# What stands in for a page that lies outside of docs/. README.md is the start page of the
# repository, as index.md is the site's.
STUBS = {
    "project/benchmarks": "benchmarks/README.md",
    "project/changelog": "CHANGELOG.md",
    "project/contributing": "CONTRIBUTING.md",
    "project/security": "SECURITY.md",
    "project/support": "SUPPORT.md",
}
_PAGE_OF = {ROOT / path: page for page, path in STUBS.items()} | {ROOT / "README.md": "index"}
_LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_NAMED_PAGE = re.compile(r"\bdocs/([\w/-]+)\.md\b")


def _sources() -> set[Path]:
    """Returns all files and folders that pages link to and that are no pages."""
    pages = [*DOCS.rglob("*.md"), *(ROOT / path for path in STUBS.values())]
    linked = {
        Path(os.path.normpath(page.parent / match[1]))
        for page in pages
        for match in _LINK.finditer(page.read_text())
    }
    return {
        path
        for path in linked
        if path.exists() and not path.is_relative_to(DOCS) and path not in _PAGE_OF
    }


def _rewrite(text: str, folder: Path, docname: str) -> str:
    """Returns a page's text with links as the site has them.

    Args:
        text: of the page.
        folder: the folder that its relative links start from.
        docname: where the site has the page.
    """
    page_folder = (DOCS / docname).parent
    up = "../" * docname.count("/")

    def link(match: re.Match[str]) -> str:
        target, anchor = Path(os.path.normpath(folder / match[1])), match[2] or ""
        if target in _PAGE_OF:
            target = DOCS / f"{_PAGE_OF[target]}.md"
        elif target.exists() and not target.is_relative_to(DOCS):
            return f"](source:{up}files/{target.relative_to(ROOT)}.html)"
        return f"]({os.path.relpath(target, page_folder)}{anchor})"

    return _LINK.sub(link, text)


def _read_page(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname in STUBS:
        path = ROOT / STUBS[docname]
        app.env.note_dependency(str(path))
        source[0] = _rewrite(path.read_text(), path.parent, docname)
    else:
        source[0] = _rewrite(source[0], (DOCS / docname).parent, docname)


def _link_named_pages(
    app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
    lines[:] = [_NAMED_PAGE.sub(r":doc:`/\1`", line) for line in lines]


def _pages_of_sources(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    highlighter = PygmentsBridge("html", app.config.pygments_style)
    for path in sorted(_sources()):
        name = str(path.relative_to(ROOT))
        if path.is_dir():
            text, language = "\n".join(sorted(entry.name for entry in path.iterdir())), "none"
        else:
            text = path.read_text()
            try:
                language = get_lexer_for_filename(name).aliases[0]
            except ClassNotFound:
                language = "none"
        body = f"<h1>{html.escape(name)}</h1>{highlighter.highlight_block(text, language)}"
        yield f"files/{name}", {"title": name, "body": body}, "page.html"


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the hooks."""
    app.connect("source-read", _read_page)
    app.connect("html-collect-pages", _pages_of_sources)
    app.connect("autodoc-process-docstring", _link_named_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

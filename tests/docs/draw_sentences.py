"""Draws sentences of pages, docstrings and error messages at random, to be read with fresh eyes.

`python -m tests.docs.draw_sentences --seed 1 --count 60` prints each with the place where it
stands. A sentence that has to be read twice is rewritten there.
"""

import argparse
import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tests.paths import ROOT

_PAGES = (
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "SUPPORT.md"),
    *("docs", "benchmarks/README.md"),
)
# Written by programs.
_RESULTS = re.compile(r"<!-- results.*?<!-- end of results -->", re.DOTALL)
_NO_PROSE = re.compile(r"^```.*?^```$|^---\n.*?^---$|^    .*?$|^#.*?$|^\(.*\)=$", re.M | re.S)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_SECTION = re.compile(r"^\s*(Args|Attributes|Raises|Returns|Yields):$", re.M)
_LEAST_WORDS = 4


@dataclass(frozen=True)
class Sentence:
    """A sentence and the place where it stands, "file:line"."""

    place: str
    text: str


@cache
def sentences() -> tuple[Sentence, ...]:
    """Returns all sentences, in a fixed order."""
    found = (*_of_pages(), *_of_sources())
    return tuple(s for s in found if len(re.findall(r"[^\W\d_]{2,}", s.text)) >= _LEAST_WORDS)


def draw(seed: int, count: int) -> list[Sentence]:
    """Returns some of the sentences at random, the same for a seed as long as none changes."""
    return random.Random(seed).sample(sentences(), count)


def _of_pages() -> Iterator[Sentence]:
    for start in _PAGES:
        path = ROOT / start
        for page in [path] if path.is_file() else sorted(path.rglob("*.md")):
            name = str(page.relative_to(ROOT))
            yield from of_page(name, page.read_text())


def of_page(name: str, text: str) -> Iterator[Sentence]:
    """Yields the sentences of a page of Markdown; cells of tables are taken for paragraphs."""
    for pattern in (_RESULTS, _NO_PROSE):
        text = pattern.sub(lambda match: "\n" * match[0].count("\n"), text)
    for line, paragraph in _paragraphs(text):
        if paragraph.startswith("|"):
            for row, cells in enumerate(paragraph.split("\n")):
                for cell in cells.split(" | "):
                    yield from _split(f"{name}:{line + row}", cell.strip("| "))
        else:
            yield from _split(f"{name}:{line}", paragraph)


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of what blank lines and marks of lists part."""
    begin, lines = 0, list[str]()
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        ends = not line.strip() or re.match(r"\s*([-*:]|\d+\.) ", line)
        if ends and lines:
            yield begin, "\n".join(lines)
            lines = []
        if line.strip():
            begin = begin if lines else number
            lines.append(re.sub(r"^\s*([-*:]|\d+\.) ", "", line).strip())


def _split(place: str, text: str) -> Iterator[Sentence]:
    text = " ".join(_LINK.sub(r"\1", text).replace("**", "").split())
    for sentence in re.split(r"(?<=[.!?:]) +(?=[A-Z`\"])", text):
        yield Sentence(place, sentence)


def _of_sources() -> Iterator[Sentence]:
    for folder in ("torchrec_bls", "sharding"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from of_source(str(path.relative_to(ROOT)), path.read_text())


def of_source(name: str, source: str) -> Iterator[Sentence]:
    """Yields the sentences of a module: its public docstrings, what it raises and its help."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            public = isinstance(node, ast.Module) or not node.name.startswith("_")
            if public and (docstring := ast.get_docstring(node)):
                yield from _of_docstring(f"{name}:{getattr(node, 'lineno', 1)}", docstring)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args[:1]:
                yield from _split(f"{name}:{node.lineno}", _text_of(argument))
        elif isinstance(node, ast.keyword) and node.arg in ("help", "description"):
            yield from _split(f"{name}:{node.value.lineno}", _text_of(node.value))


def _of_docstring(place: str, docstring: str) -> Iterator[Sentence]:
    for _, paragraph in _paragraphs(_SECTION.sub("", docstring)):
        # Each argument begins a line of its own; what it says may go on in the next.
        for entry in re.split(r"\n(?=[\w, `]+: )", paragraph):
            yield from _split(place, entry)


def _text_of(node: ast.expr) -> str:
    """Returns a text as the source has it, with the names of what is put in in braces."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            each.value if isinstance(each, ast.Constant) else "{" + ast.unparse(each.value) + "}"
            for each in node.values
            if isinstance(each, (ast.Constant, ast.FormattedValue))
        )
    return ""


def _main() -> None:
    parser = argparse.ArgumentParser(description="Draws sentences at random, to be read.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=60)
    options = parser.parse_args()
    for number, each in enumerate(draw(options.seed, options.count), start=1):
        print(f"{number:3} {each.place}\n    {each.text}")


if __name__ == "__main__":
    _main()

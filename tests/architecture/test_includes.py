"""Folders of csrc/ include no more than docs/design/architecture.md allows.

Python's imports are checked by `make lint`, by the rules in .importlinter.
"""

import re
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/design/architecture.md"
CSRC = ROOT / "csrc"
# They join all of csrc/, and nothing includes them.
ABOVE_ALL = {"bindings", "fuzz", "tests"}

Graph = dict[str, set[str]]


def allowed() -> Graph:
    """Returns what each folder may include: the table of the page."""
    section = PAGE.read_text().split("### csrc\n", 1)[1].split("\n#", 1)[0]
    rows = (line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `"))
    named = ([re.findall(r"`([^`]+)`", cell) for cell in row] for row in rows)
    return {folder: set(others) for [folder], others in named}


def includes() -> Graph:
    """Returns which files each source includes."""
    return {
        str(path.relative_to(CSRC)): set(
            re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
        )
        for path in CSRC.rglob("*")
        if path.suffix in (".h", ".cpp", ".inc")
    }


def folder_of(file: str, folders: Iterable[str]) -> str | None:
    """Returns the longest of the folders that a file lies in."""
    return max((f for f in folders if f"{file}/".startswith(f"{f}/")), key=len, default=None)


def forbidden(files: Graph, page: Graph) -> list[str]:
    """Returns each include that the page does not allow."""
    return [
        f"{file} includes {other}"
        for file, others in sorted(files.items())
        for other in sorted(others)
        if (folder := folder_of(file, page)) != (whose := folder_of(other, page))
        and (folder is None or whose not in page[folder])
    ]


def test_folders_include_what_the_page_allows() -> None:
    files = {
        name: names for name, names in includes().items() if name.split("/")[0] not in ABOVE_ALL
    }
    assert forbidden(files, allowed()) == []


def test_the_page_allows_no_ring_and_names_what_is_there() -> None:
    page = allowed()
    TopologicalSorter(page).prepare()
    assert [name for name in page if not (CSRC / name).exists()] == []


@pytest.mark.parametrize("other", ["channel/channel.h", "bindings/bindings.h"])
def test_an_arrow_up_is_found(other: str) -> None:
    assert forbidden({"transport/a.h": {other}}, allowed()) == [f"transport/a.h includes {other}"]


def test_files_are_included_by_their_path() -> None:
    included = set().union(*includes().values())
    assert [name for name in sorted(included) if not (CSRC / name).exists()] == []

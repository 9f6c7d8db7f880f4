"""A notebook as a program: its cells, and what the page says that they print."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext
from nbclient import NotebookClient

from tests.docs.tutorials import DEADLINE

_OUTPUT = re.compile(r"\A```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Cell:
    """A cell of code that has run.

    Attributes:
        source: what it says.
        printed: what it printed.
        expected: what the page shows behind it; lines in this order, others between.
    """

    source: str
    printed: str
    expected: str = ""


def sources(page: Path) -> list[tuple[str, str]]:
    """Returns kind and text of each cell of a notebook, in either of its two forms."""
    return [(cell.cell_type, cell.source) for cell in jupytext.read(page).cells]


def run(page: Path, folder: Path) -> list[Cell]:
    """Runs a notebook in a folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = jupytext.read(page)
    NotebookClient(
        notebook, timeout=DEADLINE, kernel_name="python3", resources={"metadata": {"path": folder}}
    ).execute()
    cells: list[Cell] = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cells.append(Cell(cell.source, _printed(cell.outputs)))
        elif cells and (shown := _OUTPUT.match(cell.source)):
            cells[-1].expected = shown[1]
    return cells


def _printed(outputs: list[Any]) -> str:
    return "".join(each.text for each in outputs if each.output_type == "stream")

"""The README's snippet is the example's, CI runs its commands, and it installs a tested trio."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.docs.tutorials import read
from tests.paths import ROOT
from torchrec_bls._trios import BESIDE_TORCHREC, TRIOS

README = ROOT / "README.md"


def blocks(page: Path, language: str) -> list[list[str]]:
    """Returns the lines of each block of code, which may stand in a list."""
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```$", page.read_text(), re.M | re.S)
    return [[line.strip() for line in block.splitlines()] for block in found]


def test_the_snippet_is_of_the_quickstart() -> None:
    example = [line.strip() for line in (ROOT / "examples/quickstart.py").read_text().splitlines()]
    (snippet,) = blocks(README, "python")
    # The example imports more of the package, a name a line.
    imports, lines = snippet[0], [line for line in snippet[1:] if line]
    assert all(f"{name}," in example for name in imports.split(" import ")[1].split(", "))
    start = example.index(lines[0])
    assert [line for line in example[start:] if line][: len(lines)] == lines


@pytest.mark.parametrize("page", [README, ROOT / "docs/guide.md"], ids=lambda page: page.name)
def test_ci_runs_every_command(page: Path) -> None:
    steps = re.findall(r"^step (.*)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    if ".ci/serve_demo" in steps:
        steps += [line.strip() for line in (ROOT / ".ci" / "serve_demo").read_text().splitlines()]
    # `make test-slow` runs the commands of tutorials.
    for tutorial in map(read, (ROOT / "docs" / "tutorials").glob("*.md")):
        steps += [line for command in tutorial.commands for line in command.script.splitlines()]
    commands = [line for block in blocks(page, "sh") for line in block]
    assert len(commands) >= 3
    for command in commands:
        # The file after DATA= is another one there, and more options may follow.
        start = re.sub(r"(?<=DATA=).*", "", command)
        assert any(step.startswith(start) for step in steps), f"{command} is not in .ci/run"


@pytest.mark.parametrize("page", ["README.md", "docs/start/install.md"])
def test_what_pip_installs_is_the_newest_trio(page: str) -> None:
    text = (ROOT / page).read_text()
    trio, torchrec, package = re.findall(r"^ +(pip install .*)$", text, re.MULTILINE)[:3]
    newest = TRIOS[-1]
    pinned = (f"torch=={newest.torch}", f"fbgemm-gpu-cpu=={newest.fbgemm}", *BESIDE_TORCHREC)
    assert shlex.split(trio) == ["pip", "install", *pinned]
    assert shlex.split(torchrec)[2:] == ["--no-deps", f"torchrec=={newest.torchrec}"]
    assert package == "pip install ."

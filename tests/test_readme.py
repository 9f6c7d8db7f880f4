"""What the README promises: its snippet is the example, its commands are run before every merge."""

from __future__ import annotations

import re

from tests.paths import ROOT

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_snippet_is_the_quickstart() -> None:
    assert blocks("python") == [(ROOT / "examples" / "quickstart.py").read_text()]


def test_ci_runs_every_command() -> None:
    steps = re.findall(r"^step (.*)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) >= 5
    for command in commands:
        # The file after DATA= is another one there, and more options may follow.
        start = re.sub(r"(?<=DATA=).*", "", command)
        assert any(step.startswith(start) for step in steps), f"{command} is not in .ci/run"


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README)
    missing = [t for t in targets if "://" not in t and not (ROOT / t).exists()]
    assert not missing

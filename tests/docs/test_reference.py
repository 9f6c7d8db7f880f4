"""The reference has a place for every public name, command and environment variable."""

import importlib
import re
from dataclasses import fields

import pytest

from tests.paths import ROOT
from tests.public_api import MODULES
from torchrec_bls import VerbsConfig
from torchrec_bls.collective.backend.options import ENVIRONMENT_VARIABLE

REFERENCE = ROOT / "docs" / "reference"


def reference() -> str:
    return "\n".join(page.read_text() for page in sorted(REFERENCE.glob("api-*.md")))


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_documented(module: str) -> None:
    words = set(re.findall(r"\w+", reference()))
    assert set(importlib.import_module(module).__all__) - words == set()


def test_every_environment_variable_is_documented() -> None:
    names = {f"TORCHREC_BLS_IB_{field.name.upper()}" for field in fields(VerbsConfig)}
    page = (REFERENCE / "environment.md").read_text()
    assert set(re.findall(r"`(TORCHREC_BLS_\w+)`", page)) == names | {ENVIRONMENT_VARIABLE}


def test_every_command_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    from torchrec_bls.cli.main import run

    with pytest.raises(SystemExit):
        run(["--help"])
    commands = re.findall(r"^    ([a-z-]+)(?: |$)", capsys.readouterr().out, re.MULTILINE)
    assert len(commands) >= 6
    page = (REFERENCE / "command-line.md").read_text()
    assert re.findall(r"{command-help} ([a-z-]+)", page) == commands

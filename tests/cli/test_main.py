"""The command line as a whole: its version, and the examples of its help, which it takes."""

import argparse
import re
import shlex
from importlib.metadata import version

import pytest

from torchrec_bls.cli.main import make_parser, run


def sub_commands() -> dict[str, argparse.ArgumentParser]:
    (choices,) = (
        action.choices
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return dict(choices)


@pytest.mark.parametrize("name", sub_commands())
def test_examples_of_the_help_are_command_lines(name: str) -> None:
    help_text = sub_commands()[name].format_help()
    lines = re.findall(r"^  torchrec-bls (.*)$", help_text.partition("examples:")[2], re.MULTILINE)
    assert lines
    for line in lines:
        arguments = shlex.split(line.partition(" > ")[0])
        assert arguments[0] == name
        assert vars(make_parser().parse_args(arguments))["command"]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        run(["--version"])
    assert capsys.readouterr().out == version("torchrec-bls") + "\n"


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    help_text = capsys.readouterr().err
    assert all(name in help_text for name in sub_commands())

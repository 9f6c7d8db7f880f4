"""How the command line's help is laid out."""

import argparse
from typing import Any

_HEADING = "examples:\n"


def examples(*commands: str) -> str:
    """Returns the epilog of a sub-command with these command lines, one below the other."""
    return _HEADING + "".join(f"  torchrec-bls {command}\n" for command in commands)


class SubParser(argparse.ArgumentParser):
    """The parser of a sub-command, which leaves its examples as they are."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Formatter, **options)


class _Formatter(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_HEADING) else super()._fill_text(text, width, indent)

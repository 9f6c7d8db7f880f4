"""A tutorial as a program: its blocks of Python are files, its blocks of sh commands to run."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

# A fence, what it says, and the fence again; no tutorial has one in a list.
_BLOCK = re.compile(r"^```(python|sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FIGURE = re.compile(r"\d+(?:[.,]\d+)+")
_FILE = re.compile(r"# (\w+\.py)\n")
# Several starts of torchrun, on a machine that may be five times as slow.
DEADLINE = 300.0


@dataclass
class Command:
    """Lines of shell, and what they print: lines in this order, others between.

    `...` stands for any text, and figures like 1.5 and 1,059 for any such: a page shows measured
    ones. Whole numbers below a thousand stand for themselves.
    """

    script: str
    expected: str = ""


@dataclass
class Tutorial:
    """What a page has its reader do.

    Attributes:
        files: text of each file that blocks of Python make up: one begins with its name as a
            comment, and those that follow go on with it.
        commands: in the order of the page.
    """

    files: dict[str, str]
    commands: list[Command]


def read(page: Path) -> Tutorial:
    """Reads a page.

    Raises:
        ValueError: a block of Python before the first that names a file, or a text that follows no
            command.
    """
    tutorial, name, after_command = Tutorial({}, []), None, False
    for language, text in _BLOCK.findall(page.read_text()):
        if language == "python":
            if named := _FILE.match(text):
                name = named[1]
            if name is None:
                raise ValueError(f"{page} has Python before it names a file: {text}")
            tutorial.files[name] = tutorial.files.get(name, "") + text
        elif language == "sh":
            tutorial.commands.append(Command(text))
        elif not after_command:
            raise ValueError(f"{page} has an output without a command: {text}")
        else:
            tutorial.commands[-1].expected = text
        after_command = language == "sh"
    return tutorial


def run(tutorial: Tutorial, folder: Path) -> Iterator[tuple[Command, str]]:
    """Writes the files and runs the commands; yields each with what it printed. What they leave
    running is killed at the end.

    Raises:
        subprocess.SubprocessError: a command failed, or took too long.
    """
    for name, text in tutorial.files.items():
        (folder / name).write_text(text)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with ExitStack() as left:
        for command in tutorial.commands:
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", command.script],
                cwd=folder,
                env={**os.environ, "PATH": path},
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            left.callback(_kill_group, process.pid)
            printed, _ = process.communicate(timeout=DEADLINE)
            print(printed)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, command.script)
            yield command, printed


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def missing_line(expected: str, printed: str) -> str | None:
    """Returns the first expected line that isn't printed behind those before it, or None."""
    lines = iter(map(_comparable, printed.splitlines()))
    for line in expected.splitlines():
        pattern = re.escape(_comparable(line)).replace(re.escape("..."), ".*")
        if not any(re.fullmatch(pattern, candidate) for candidate in lines):
            return line
    return None


def _comparable(line: str) -> str:
    return _FIGURE.sub("FIGURE", " ".join(line.split()))

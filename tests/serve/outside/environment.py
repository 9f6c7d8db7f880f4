"""Virtual environments with programs of others, which do not fit that of the tests."""

import subprocess
import sys
import venv
from pathlib import Path

from tests.paths import ROOT


def python_with(name: str, *packages: str) -> Path:
    """Returns the interpreter of an environment with packages. It is made once.

    Args:
        name: name of its folder below build/.
        packages: what pip is to install.
    """
    folder = ROOT / "build" / name
    python, done = folder / "bin" / "python", folder / ".installed"
    wanted = "\n".join(packages)
    if not done.exists() or done.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(install, check=True, timeout=1800)
        done.write_text(wanted)
    return python


def run_in(python: Path, module: str, said: str, deadline: float) -> int:
    """Runs a module of the tests by another interpreter, and returns its exit status.

    Args:
        python: the interpreter.
        module: name of the module.
        said: what it reads from its standard input.
        deadline: seconds that it may take.
    """
    sys.stdout.flush()
    command = [str(python), "-m", module]
    return subprocess.run(command, input=said, text=True, cwd=ROOT, timeout=deadline).returncode

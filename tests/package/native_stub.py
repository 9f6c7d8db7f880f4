"""The stub of the compiled module, as pybind11-stubgen writes it, in fewer words.

`python -m tests.package.native_stub` writes it anew after a change of csrc/bindings.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.paths import ROOT
from torchrec_bls import _native

FILE = ROOT / "torchrec_bls" / "_native.pyi"
_HEAD = "# Written by `python -m tests.package.native_stub`.\n"
_SHORTER = (
    # pybind11 takes whatever has __int__, numbers with a fraction too. Callers are held to numbers.
    (r"typing\.SupportsInt \| typing\.SupportsIndex", "int"),
    (r"typing\.SupportsFloat \| typing\.SupportsIndex", "float"),
    (r'typing\.Annotated\[(.*?), "FixedSize\(\d+\)"\]', r"\1"),
    (r": (\w+) = None", r": \1 | None = None"),
    (r"collections\.abc\.", ""),
    (r"import collections\.abc", "from collections.abc import Callable, Iterable, Sequence"),
    (r"from __future__ import annotations\n", ""),
    (r"\n__all__: list.*", ""),
    # Python says from 3.12 on that buffers are buffers.
    (r"\n +def __(release_)?buffer__\(.*\n.*\.\.\.", ""),
)


def stub() -> str:
    """Returns the stub of the module that is installed.

    Raises:
        RuntimeError: it was built without RDMA, so that a part is missing.
    """
    if not _native.WITH_VERBS:
        raise RuntimeError("the module was built without RDMA: install libibverbs-dev, and build")
    with tempfile.TemporaryDirectory() as folder:
        _run("pybind11_stubgen", "torchrec_bls._native", "--output-dir", folder)
        text = Path(folder, "torchrec_bls", "_native.pyi").read_text()
    text = _HEAD + text
    for pattern, shorter in _SHORTER:
        text = re.sub(pattern, shorter, text)
    name = ("--stdin-filename", str(FILE), "-")
    in_order = _run("ruff", "check", "--fix", "--exit-zero", "--quiet", *name, text=text)
    return _run("ruff", "format", *name, text=in_order)


def _run(module: str, *arguments: str, text: str | None = None) -> str:
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


if __name__ == "__main__":
    FILE.write_text(stub())

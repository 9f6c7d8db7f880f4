"""Tries a wheel as a user has it: in an environment of its own, without compiler and checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.paths import ROOT
from torchrec_bls._trios import BESIDE_TORCHREC, DEFAULT

DEADLINE = 600


def make_environment(python: str, folder: Path) -> None:
    """Makes an environment of `python` in `folder` that has TorchRec."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", folder], check=True)
    pair = (f"torch=={DEFAULT.torch}", f"fbgemm-gpu-cpu=={DEFAULT.fbgemm}")
    install(folder, *pair, *BESIDE_TORCHREC)
    # With what it requires, it would bring the CUDA build of fbgemm.
    install(folder, "--no-deps", f"torchrec=={DEFAULT.torchrec}")


def try_wheel(wheel: Path, folder: Path) -> None:
    """Installs `wheel` into the environment in `folder` and runs the quick start there."""
    install(folder, str(wheel))
    shutil.copy(ROOT / "examples" / "quickstart.py", folder)
    shutil.copy(ROOT / "tests" / "wheels" / "smoke.py", folder)
    run(folder, "torchrun", "--nproc-per-node", "2", "smoke.py")
    run(folder, "torchrun", "--nproc-per-node", "2", "quickstart.py")
    run(folder, "torchrec-bls", "doctor")


def install(folder: Path, *arguments: str) -> None:
    """Installs packages into the environment in `folder` without a compiler."""
    programs = folder / "bin"
    command = [programs / "python", "-m", "pip", "install", "--quiet", *arguments]
    subprocess.run(command, env=os.environ | {"PATH": str(programs)}, check=True)


def run(folder: Path, program: str, *arguments: str) -> None:
    """Runs a program of the environment in it, with nothing else on the path."""
    programs = folder / "bin"
    # No variable of this process, which might lead to this checkout.
    environment = {"PATH": str(programs), "HOME": str(folder), "LANG": "C.UTF-8"}
    command = [programs / program, *arguments]
    subprocess.run(command, cwd=folder, env=environment, timeout=DEADLINE, check=True)

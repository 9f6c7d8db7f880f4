"""Builds the source distribution, and from it a wheel for each Python that installs elsewhere."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tests.paths import ROOT

from .linkage import Linkage, read_linkage
from .toolchain import write_toolchain

PLATFORM = f"manylinux_2_28_{platform.machine()}"
CONTENTS = (
    "torchrec_bls/__init__.py",
    "torchrec_bls/_native.pyi",
    "torchrec_bls/_trios.py",
    "torchrec_bls/py.typed",
    "torchrec_bls/sharding/__init__.py",
    "torchrec_bls/sharding/costs/profiles/epyc-milan-2-cores.json",
    "torchrec_bls_command.py",
)


def build_sdist(folder: Path) -> Path:
    """Builds the source distribution into `folder`, with the back end and nothing besides."""
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    (sdist,) = folder.glob("*.tar.gz")
    return sdist


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpacks the source distribution into `folder` and returns where its sources are."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)
    (source,) = folder.iterdir()
    return source


def build_wheel(python: str, source: Path, work: Path) -> Path:
    """Builds a wheel with Zig in an environment of `python`; returns it without its final name."""
    toolchain = write_toolchain(work / "zig")
    environment = work / f"build-{Path(python).name}"
    subprocess.run([python, "-m", "venv", "--clear", environment], check=True)
    out = work / "raw"
    with tempfile.TemporaryDirectory() as fresh:
        command = [environment / "bin/python", "-m", "pip", "wheel", "--no-deps"]
        subprocess.run(
            [*command, "--wheel-dir", fresh, source],
            check=True,
            # The C++ library, which Zig compiles once, stays in this checkout.
            env=os.environ
            | {"CMAKE_TOOLCHAIN_FILE": str(toolchain), "ZIG_GLOBAL_CACHE_DIR": str(work / "cache")},
        )
        (wheel,) = Path(fresh).glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return wheel.replace(out / wheel.name)


def tag_wheel(wheel: Path, folder: Path) -> Path:
    """Has auditwheel look at the symbols' versions and name the wheel for its platform."""
    before = set(folder.glob("*.whl"))
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM, "--only-plat"]
    subprocess.run([*command, "--wheel-dir", folder, wheel], check=True)
    (tagged,) = set(folder.glob("*.whl")) - before
    return tagged


def check_wheel(wheel: Path) -> Linkage:
    """Raises if the wheel lacks something, or holds or links what it must not."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        (module,) = (name for name in names if name.startswith("torchrec_bls/_native.cpython"))
        linkage = read_linkage(Path(archive.extract(module, folder)))
    faults = [f"lacks {name}" for name in CONTENTS if name not in names]
    # Another package's library, libibverbs for one, would not fit that host's kernel and drivers.
    faults += [f"brings {name}" for name in names if ".so" in name and name != module]
    faults += linkage.faults()
    if faults:
        raise RuntimeError(f"{wheel.name} {', '.join(faults)}")
    return linkage

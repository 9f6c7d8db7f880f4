"""Zig's C++ compiler, with which a program needs no glibc newer than the one asked for."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path

GLIBC = "2.28"
INCLUDE = Path("/usr/include")


def write_toolchain(folder: Path) -> Path:
    """Writes what CMake needs to build with Zig into `folder` and returns the toolchain file."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise RuntimeError("ziglang is not installed: run `make wheels`")
    zig = Path(spec.origin).with_name("zig")
    folder.mkdir(parents=True, exist_ok=True)
    # The system's can't read what Zig compiles for whole programs, and CMake's take no arguments.
    for tool in ("ar", "ranlib"):
        script = folder / tool
        script.write_text(f'#!/bin/sh\nexec "{zig}" {tool} "$@"\n')
        script.chmod(0o755)
    # These folders alone: beside them lie the headers of this machine's own glibc.
    headers = folder / "include"
    headers.mkdir(exist_ok=True)
    for name in ("infiniband", "rdma"):
        if not (INCLUDE / name).is_dir():
            raise RuntimeError(f"{INCLUDE / name} is missing: apt-get install libibverbs-dev")
        link = headers / name
        link.unlink(missing_ok=True)
        link.symlink_to(INCLUDE / name)
    target = f"{platform.machine()}-linux-gnu.{GLIBC}"
    toolchain = folder / "toolchain.cmake"
    toolchain.write_text(
        f'set(CMAKE_CXX_COMPILER "{zig}" c++ -target {target})\n'
        + "".join(
            f'set({variable} "{folder / tool}")\n'
            for tool in ("ar", "ranlib")
            for variable in (f"CMAKE_{tool.upper()}", f"CMAKE_CXX_COMPILER_{tool.upper()}")
        )
        + f'set(IBVERBS_INCLUDE "{headers}" CACHE PATH "")\n'
    )
    return toolchain

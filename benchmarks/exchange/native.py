"""Builds and runs the native peers of the all-to-all benchmark."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from benchmarks import ROOT

_BUILD = ROOT / "build" / "bench"
_NATIVE = Path("benchmarks/native")
_PROGRAMS = _BUILD / _NATIVE
_LIMIT_SECONDS = 120
_BUILD_LIMIT_SECONDS = 900

# Open MPI's mpi_yield_when_idle, single-copy mechanism and eager limit: the three settings of its
# shared-memory path that change these figures.
_MPI_TRANSFERS = {
    "cma": ["--mca", "btl_vader_single_copy_mechanism", "cma"],
    "copy twice": ["--mca", "btl_vader_single_copy_mechanism", "none"],
    "cma, eager to 64 KiB": [
        *("--mca", "btl_vader_single_copy_mechanism", "cma"),
        *("--mca", "btl_vader_eager_limit", "65536"),
        *("--mca", "btl_vader_max_send_size", "131072"),
    ],
}


def build() -> None:
    """Compiles the programs into build/bench."""
    _build(ROOT, _BUILD, "alltoall_benchmarks")


def build_program(source: Path, folder: Path) -> Path:
    """Compiles channel_alltoall of a source tree into a folder and returns the program."""
    _build(source, folder, "channel_alltoall")
    return folder / _NATIVE / "channel_alltoall"


def _build(source: Path, folder: Path, target: str) -> None:
    options = ["-DBLS_BUILD_BENCHMARKS=ON", "-DBLS_BUILD_PYTHON=OFF", "-DCMAKE_BUILD_TYPE=Release"]
    _checked(["cmake", "-S", str(source), "-B", str(folder), *options])
    _checked(["cmake", "--build", str(folder), "--target", target], _BUILD_LIMIT_SECONDS)


def mpi_version() -> str | None:
    """First line of `mpirun --version`, None when the MPI program could not be built."""
    if shutil.which("mpirun") is None or not (_PROGRAMS / "mpi_alltoall").exists():
        return None
    return _checked(["mpirun", "--version"]).splitlines()[0]


def mpi_settings(ranks: int) -> dict[str, list[str]]:
    """Settings of Open MPI to try, as mpirun arguments by description.

    Without yielding, oversubscribed ranks poll away their time slices: 4 to 30 ms a call, so that
    is left out where ranks exceed cores.
    """
    yields = [1] if ranks > len(os.sched_getaffinity(0)) else [0, 1]
    return {
        f"{transfer}, {'yield' if idle else 'poll'}": [
            *("--mca", "mpi_yield_when_idle", str(idle)),
            *arguments,
        ]
        for idle in yields
        for transfer, arguments in _MPI_TRANSFERS.items()
    }


def run_forked(program: str, ranks: int, size: int, *how: str) -> dict[str, Any]:
    """Runs raw_alltoall or channel_alltoall, which start their own ranks.

    `how` is `for_seconds` or `repeated`.
    """
    return _run([str(_PROGRAMS / program), "--ranks", str(ranks), "--bytes", str(size), *how])


def run_mpi(setting: list[str], ranks: int, size: int, *how: str) -> dict[str, Any]:
    """Runs mpi_alltoall with one of `mpi_settings`; it pins its ranks itself, as the others do."""
    program = [str(_PROGRAMS / "mpi_alltoall"), "--ranks", str(ranks), "--bytes", str(size)]
    return _run([*mpirun(ranks, _LIMIT_SECONDS), *setting, *program, *how])


def for_seconds(seconds: float) -> tuple[str, str]:
    """Aims at so much time for single calls, and for trains of them."""
    return "--seconds", str(seconds)


def repeated(calls: int) -> tuple[str, str]:
    """One train of so many calls and nothing else."""
    return "--repetitions", str(calls)


def mpirun(ranks: int, limit_seconds: int) -> list[str]:
    """How ranks are started that are more than cores."""
    launcher = ["mpirun", "--timeout", str(limit_seconds), "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        launcher.append("--allow-run-as-root")
    return [*launcher, "-n", str(ranks)]


def _run(command: list[str]) -> dict[str, Any]:
    measured: dict[str, Any] = json.loads(_checked(command).strip().splitlines()[-1])
    return measured


def _checked(command: list[str], limit_seconds: int = _LIMIT_SECONDS + 30) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr[-3000:]}"
        )
    return done.stdout

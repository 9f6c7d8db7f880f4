"""Builds and runs the native peers of the all-to-all benchmark."""

import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import ROOT

_BUILD, _NATIVE = "build/native", "benchmarks/native"
_BUILT = ROOT / _BUILD / _NATIVE
_LIMIT_SECONDS = 120
_BUILD_LIMIT_SECONDS = 900

#: The peers that are programs; Open MPI's ranks are started by mpirun.
PROGRAMS = {"raw": "raw_alltoall", "channel": "channel_alltoall", "open_mpi": "mpi_alltoall"}

# Open MPI's mpi_yield_when_idle, single-copy mechanism and eager limit: the three settings of its
# shared-memory path that change these figures.
_MPI_TRANSFERS = {
    "cma": {"btl_vader_single_copy_mechanism": "cma"},
    "copy twice": {"btl_vader_single_copy_mechanism": "none"},
    "cma, eager to 64 KiB": {
        "btl_vader_single_copy_mechanism": "cma",
        "btl_vader_eager_limit": "65536",
        "btl_vader_max_send_size": "131072",
    },
}


def build(target: str = "alltoall_benchmarks", source: Path = ROOT) -> Path:
    """Compiles one program or all, of this source tree or another one; returns their folder."""
    folder = source / _BUILD
    options = ["-DBLS_BUILD_BENCHMARKS=ON", "-DBLS_BUILD_PYTHON=OFF", "-DCMAKE_BUILD_TYPE=Release"]
    checked(["cmake", "-S", str(source), "-B", str(folder), *options])
    checked(["cmake", "--build", str(folder), "--target", target], limit=_BUILD_LIMIT_SECONDS)
    return folder / _NATIVE


def mpi_version() -> str | None:
    """First line of `mpirun --version`, None when the MPI program could not be built."""
    if shutil.which("mpirun") is None or not (_BUILT / PROGRAMS["open_mpi"]).exists():
        return None
    return checked(["mpirun", "--version"]).splitlines()[0]


def mpi_for_python() -> str | None:
    """First line of `mpirun --version` where Python programs can use it, else None, and says so."""
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        print("Open MPI is left out: it needs mpirun and mpi4py (make .venv/.mpi4py)")
        return None
    return checked(["mpirun", "--version"]).splitlines()[0]


def mpi_yields(ranks: int) -> dict[str, dict[str, str]]:
    """How ranks may wait, parameters by description.

    Without yielding, oversubscribed ranks poll away their time slices: 4 to 30 ms a call, so that
    is left out where ranks exceed cores.
    """
    polls = {} if ranks > len(os.sched_getaffinity(0)) else {"poll": "0"}
    return {name: {"mpi_yield_when_idle": idle} for name, idle in {**polls, "yield": "1"}.items()}


def mpi_settings(ranks: int) -> dict[str, dict[str, str]]:
    """Settings of Open MPI on one host to try, its parameters by description."""
    return {
        f"{transfer}, {name}": yields | parameters
        for name, yields in mpi_yields(ranks).items()
        for transfer, parameters in _MPI_TRANSFERS.items()
    }


def run(
    peer: str, ranks: int, arguments: Sequence[object], mpi: dict[str, str], cores: Iterable[int]
) -> dict[str, float]:
    """Runs one of PROGRAMS; its ranks pin themselves to `cores`. Returns median µs by kind.

    `mpi` is one of `mpi_settings`, for "open_mpi".
    """
    command = [str(_BUILT / PROGRAMS[peer]), "--ranks", str(ranks), *map(str, arguments)]
    if peer == "open_mpi":
        command = [*mpirun(ranks, _LIMIT_SECONDS, mpi), *command]
    return medians(checked(["taskset", "--cpu-list", ",".join(map(str, cores)), *command]))


def medians(output: str) -> dict[str, float]:
    """Median µs a call of single calls, "one_shot", and of "train", as a program has printed."""
    measured = json.loads(output.strip().splitlines()[-1])
    return {kind: measured[kind]["median_us"] for kind in ("one_shot", "train")}


def mpirun(ranks: int, limit_seconds: int, parameters: dict[str, str]) -> list[str]:
    """How ranks are started that may be more than cores."""
    launcher = ["mpirun", "--timeout", str(limit_seconds), "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        launcher.append("--allow-run-as-root")
    for parameter in parameters.items():
        launcher += ["--mca", *parameter]
    return [*launcher, "-n", str(ranks)]


def checked(command: list[str], limit: int = _LIMIT_SECONDS + 30) -> str:
    """What a command prints; a RuntimeError has what a failed one says."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr[-3000:]}"
        )
    return done.stdout

"""Ranks that do one piece of work after another in the same processes."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import ROOT
from benchmarks.exchange.native import mpirun
from benchmarks.harness.launch import on_ranks
from benchmarks.paper_bls import dlrm, windows
from benchmarks.paper_bls.windows import MpiBackend

_LIMIT_SECONDS = 1500
#: By the names that tasks have for them.
WORKS: dict[str, Callable[..., Any]] = {
    "windows": windows.measure,
    "dlrm": dlrm.measure,
    "overlap": windows.measure_overlaps,
}


def launch(
    ranks: int, tasks: list[tuple[str, str, Any]], mpi: bool, keep: Callable[[str, Any], None]
) -> None:
    """Does the work on `ranks` processes; `mpi` starts them by mpirun, to compare MPI as well.

    A task has a name, the kind of work and its settings. `keep` gets name and results of each task
    that was done, also if a later one fails.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory(prefix="bls-paper-") as name:
        folder = Path(name)
        (folder / "tasks").write_text(json.dumps(tasks))
        try:
            if mpi:
                command = mpirun(ranks, _LIMIT_SECONDS, {"mpi_yield_when_idle": "1"})
                # mpi4py ends all ranks when one raises.
                command += [sys.executable, "-m", "mpi4py", "-rc", "thread_level=serialized"]
                command += ["-m", __name__, name]
                subprocess.run(command, check=True, timeout=_LIMIT_SECONDS + 30, cwd=ROOT)
            else:
                on_ranks(ranks, _work, folder, None)
        finally:
            for stage, _, _ in tasks:
                if (results := folder / stage).exists():
                    keep(stage, json.loads(results.read_text()))


def _work(rank: int, folder: Path, mpi: MpiBackend | None) -> None:
    for stage, work, settings in json.loads((folder / "tasks").read_text()):
        results = WORKS[work](stage, settings, mpi)
        if rank == 0:
            (folder / stage).write_text(json.dumps(results))


def _main(folder: Path) -> None:
    """Runs on each rank that mpirun has started."""
    mpi = MpiBackend()
    rank, ranks = (int(os.environ[f"OMPI_COMM_WORLD_{of}"]) for of in ("RANK", "SIZE"))
    torch.set_num_threads(1)
    store = (folder / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    _work(rank, folder, mpi)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))

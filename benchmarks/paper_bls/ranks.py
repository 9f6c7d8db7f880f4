"""Started once a rank by `launch`: does one piece of work after another in the same processes."""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.exchange.native import mpirun

_LIMIT_SECONDS = 1500

#: Name, kind of work, and its settings.
Task = tuple[str, str, dict[str, Any]]


def launch(ranks: int, tasks: list[Task], mpi: bool) -> Iterator[tuple[str, Any]]:
    """Does the work on `ranks` processes; yields the name and results of each task.

    Args:
        ranks: number of processes.
        tasks: what they do.
        mpi: start them by mpirun rather than torchrun, so that MPI can be compared as well.

    Raises:
        subprocess.CalledProcessError: a rank failed; it has said why on stderr. The tasks before
            have been yielded.
    """
    with tempfile.TemporaryDirectory(prefix="bls-paper-") as name:
        folder = Path(name)
        (folder / "tasks.json").write_text(json.dumps(tasks))
        program = ["-m", __name__, str(folder)]
        if mpi:
            settings = ["--mca", "mpi_yield_when_idle", "1"]
            command = [*mpirun(ranks, _LIMIT_SECONDS), *settings, sys.executable, *program]
        else:
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            command = [sys.executable, *launcher, *program]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(command, env=environment, timeout=_LIMIT_SECONDS + 30, cwd=ROOT)
        for stage, _, _ in tasks:
            results = _results(folder, stage)
            if results.exists():
                yield stage, json.loads(results.read_text())
        done.check_returncode()


def _results(folder: Path, stage: str) -> Path:
    return folder / f"{stage}.json"


def _main() -> None:
    import torch
    import torch.distributed as dist

    from benchmarks.paper_bls import dlrm, overlap, windows
    from benchmarks.paper_bls.mpi import MpiBackend, launched_by_mpirun

    works: dict[str, Callable[..., Any]] = {
        "windows": windows.measure,
        "dlrm": dlrm.measure,
        "overlap": overlap.measure,
    }
    folder = Path(sys.argv[1])
    mpi = MpiBackend() if launched_by_mpirun() else None
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE") if mpi else ("RANK", "WORLD_SIZE")
    rank, ranks = (int(os.environ[name]) for name in names)
    torch.set_num_threads(1)
    store = (folder / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    for stage, work, settings in json.loads((folder / "tasks.json").read_text()):
        results = works[work](stage, settings, mpi)
        if rank == 0:
            _results(folder, stage).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        _main()
    except BaseException:
        traceback.print_exc()
        # The launcher then ends the others, which may be waiting for this rank.
        os._exit(1)

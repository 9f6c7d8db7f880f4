"""The MPI backend of torch.distributed, restated: torch's own wheels have none."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

_LIMIT_SECONDS = 120.0


def launched_by_mpirun() -> bool:
    """Whether this process is a rank of an Open MPI job."""
    return "OMPI_COMM_WORLD_RANK" in os.environ


class MpiBackend:
    """One thread a process runs blocking `MPI_Alltoallv`s in the order of the calls.

    That is what ProcessGroupMPI does (BLS paper, sec. III-A). Here the thread is one of Python; a
    call needs the interpreter to begin and to end, not in between.
    """

    def __init__(self) -> None:
        import mpi4py

        mpi4py.rc.thread_level = "serialized"
        from mpi4py import MPI

        self._group = MPI.COMM_WORLD.Dup()
        self._progress = ThreadPoolExecutor(1, thread_name_prefix="mpi progress")

    def start(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_splits: list[int],
        send_splits: list[int],
    ) -> "_MpiWork":
        """Queues an all-to-all of flat tensors, with splits in elements."""
        call = self._progress.submit(
            self._group.Alltoallv, [sent.numpy(), send_splits], [received.numpy(), receive_splits]
        )
        return _MpiWork(call)


class _MpiWork:
    def __init__(self, call: Future[Any]) -> None:
        self._call = call

    def wait(self) -> None:
        self._call.result(_LIMIT_SECONDS)

"""The backends that are compared. That of MPI is restated: torch's own wheels have none."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

from dlrm_plain.exchange import Start, over
from dlrm_plain.run import make_group
from torch import Tensor

_LIMIT_SECONDS = 120.0


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

    def start(self, received: Tensor, sent: Tensor, receives: list[int], sends: list[int]) -> Any:
        """Queues an all-to-all of flat tensors with splits in elements; returns its handle."""
        memory = [sent.numpy(), sends], [received.numpy(), receives]
        call = self._progress.submit(self._group.Alltoallv, *memory)
        return SimpleNamespace(wait=partial(call.result, _LIMIT_SECONDS))


def starts(bound: int, largest: int, mpi: MpiBackend | None) -> dict[str, Start]:
    """What begins an all-to-all at `bound`, by backend; `largest` has the bytes of a message."""
    groups = {name: over(make_group(name, bound, largest)) for name in ("gloo", "bls")}
    return groups | ({"mpi": mpi.start} if mpi else {})

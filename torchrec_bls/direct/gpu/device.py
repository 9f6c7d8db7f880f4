"""A GPU that reads host tables: its runtime, and a stream for the reads."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from torchrec_bls.direct.gpu.cuda import Cuda, CudaRuntime, Event
from torchrec_bls.direct.gpu.report import REPORT_FIELDS


class Gpu(Protocol):
    """A GPU, with a stream of its own for reads.

    Attributes:
        device: the GPU.
        cuda: its runtime.
    """

    device: torch.device
    cuda: Cuda

    def reading(self, tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        """Returns a context whose launches go to the stream for reads: behind what the caller's
        stream has by now, and before what it gets later.

        Args:
            tensors: tensors of the caller's stream that the launches read or write. Their memory
                serves nothing else before that is done.
        """

    def mark(self) -> Event:
        """Returns an event behind what the stream for reads has by now."""

    def new_report(self, programs: int) -> torch.Tensor:
        """Returns a report of bad ids for one launch, which the host reads without a copy, int64
        [programs, 3]. It has to stay until the GPU has written it."""


class CudaGpu:
    """A GPU of CUDA, see Gpu.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.cuda = CudaRuntime(index)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @contextmanager
    def reading(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """See Gpu."""
        caller = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(caller)
        for tensor in tensors:
            tensor.record_stream(self._stream)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            caller.wait_stream(self._stream)

    def mark(self) -> Event:
        """See Gpu."""
        event: Event = self._stream.record_event()
        return event

    def new_report(self, programs: int) -> torch.Tensor:
        """See Gpu."""
        return torch.empty((programs, REPORT_FIELDS), dtype=torch.int64, pin_memory=True)

"""A forward that is captured in a CUDA graph: what its lookups leave for the replays, which run no
Python."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class _Gpu(Protocol):
    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor: ...


class Capture:
    """A forward in a CUDA graph. One thread makes it: it runs the forward as usual first, and then
    once more while the graph is captured.

    Args:
        gpu: the GPU.

    Attributes:
        lookups: each CapturedLookup that is in the graph.
        is_running: whether the graph is captured now: nothing is read before it is replayed.
    """

    def __init__(self, gpu: _Gpu) -> None:
        self.lookups: list[Any] = []
        self.is_running = False
        self._gpu = gpu
        # Tensors of the host that the forward copies, in their order, and their copies. A graph
        # would copy from memory that serves something else by then.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._place = 0

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Returns a context in which this thread runs the forward as usual."""
        self._copies = []
        with self._of_this_thread():
            yield

    @contextmanager
    def running(self) -> Iterator[None]:
        """Returns a context in which this thread runs the forward in the graph."""
        self.lookups, self._place, self.is_running = [], 0, True
        try:
            with self._of_this_thread():
                yield
        finally:
            self.is_running = False

    @contextmanager
    def _of_this_thread(self) -> Iterator[None]:
        _here.capture = self
        try:
            yield
        finally:
            _here.capture = None

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor of the host, which is the same in all replays.

        Raises:
            ValueError: the forward copied another one before it was captured.
        """
        if not self.is_running:
            copy = self._gpu.copy_of(tensor)
            self._copies.append((tensor.clone(), copy))
            return copy
        place, self._place = self._place, self._place + 1
        if place >= len(self._copies) or not torch.equal(self._copies[place][0], tensor):
            raise ValueError(
                "the forward gives its lookups other tensors of the host in each run, which a "
                "CUDA graph can't: make them on the GPU, or of the batch"
            )
        return self._copies[place][1]


def copied(gpu: _Gpu, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy on a GPU of a tensor of the host. In a forward that is captured it is the same
    for all replays.

    Raises:
        ValueError: see Capture.copy_of.
    """
    capture = capture_here()
    return gpu.copy_of(tensor) if capture is None else capture.copy_of(tensor)


def capture_here() -> Capture | None:
    """Returns what this thread captures, None if it captures nothing."""
    return getattr(_here, "capture", None)


_here = threading.local()

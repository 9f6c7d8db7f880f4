"""A GPU that outputs are on: its runtime, and streams for reads of host tables and for copies."""

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

import torch

from torchrec_bls.direct.gpu.capture import Capture, capture_here
from torchrec_bls.direct.gpu.cuda import Cuda, CudaRuntime, Event
from torchrec_bls.direct.gpu.report import REPORT_FIELDS

# By their numbers: all modules of a process read by one stream, one after the other.
_gpus: "dict[int, Gpu]" = {}
# From 16 on, a lookup of a batch takes no longer than with all SMs (docs/design/gpu-reads.md).
_PROGRAMS = 16
# Forwards before a capture, as torch's own functions have them: libraries begin in the first ones.
_WARM_UPS = 3

_T = TypeVar("_T")


class Gpu(Protocol):
    """A GPU, with streams of its own for reads, and for copies of outputs.

    Attributes:
        device: the GPU.
    """

    device: torch.device

    @property
    def cuda(self) -> Cuda:
        """Returns its runtime."""

    def reading(self, tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        """Returns a context whose launches go to the stream for reads: behind what the caller's
        stream has by now, and before what it gets later.

        Args:
            tensors: tensors of the caller's stream that the launches read or write. Their memory
                serves nothing else before that is done.

        Raises:
            ValueError: the caller's stream is captured in a CUDA graph, and not by `captured`.
        """

    def mark(self) -> Event:
        """Returns an event behind what the stream for reads has by now."""

    def has(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor is on this GPU."""

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor of the host, made on the caller's stream. The host does not
        wait for it, and may write to the tensor at once."""

    def empty_output(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialized tensor of the host, which `copy_of_output` copies as it is."""

    def copy_of_output(self, output: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor of the host, which the caller's stream has from now on. The
        copy waits for nothing that the caller's stream has by now, nor the host for the copy.
        Nobody may write to the tensor any more."""

    def new_report(self) -> torch.Tensor:
        """Returns a report of bad ids for one launch, which the host reads without a copy, int64
        [programs, 3]. It has to stay until the GPU has written it. Its length is the number of
        programs of the launch, each of which takes a part of an SM from other work."""

    def settle(self) -> None:
        """Waits until the GPU is done with all that was launched, on all streams."""

    def new_report_in_graph(self) -> torch.Tensor:
        """Returns the same on the GPU, for a launch that is captured."""

    def copy_of_report(self, report: torch.Tensor) -> torch.Tensor:
        """Returns a copy for the host of a report on the GPU, made on the current stream. The host
        does not wait for it."""

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an uninitialized tensor of this GPU with the shape and dtype of another one."""

    def captured(
        self, forward: Callable[[], _T], capture: Capture
    ) -> tuple[Callable[[], None], _T]:
        """Captures a forward in a CUDA graph, after some that run as usual.

        Args:
            forward: the forward.
            capture: what its lookups leave.

        Returns:
            A function that launches the graph on the current stream, and the forward's result, in
            memory that each launch writes.
        """


class CudaGpu:
    """A GPU of CUDA, see Gpu.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.cuda: Cuda = CudaRuntime(index)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @contextmanager
    def reading(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """See Gpu."""
        caller = torch.cuda.current_stream(self.device)
        if torch.cuda.is_current_stream_capturing():
            _check_is_ours()
            yield  # what follows the launches in the graph follows them in its replays
            return
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

    def has(self, tensor: torch.Tensor) -> bool:
        """See Gpu."""
        return tensor.device == self.device

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Gpu."""
        # From pageable memory the host would wait. Pinned memory of the caller's may be written to.
        return self._pinned(tensor).to(self.device, non_blocking=True)

    def empty_output(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See Gpu."""
        # torch keeps such memory for the copies from it that are under way, and uses it again.
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy_of_output(self, output: torch.Tensor) -> torch.Tensor:
        """See Gpu."""
        if not (output.is_pinned() and output.is_contiguous()):
            output = self._pinned(output)
        caller = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copies):
            copy = output.to(self.device, non_blocking=True)
        caller.wait_stream(self._copies)
        copy.record_stream(caller)
        return copy

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.empty_output(tensor.shape, tensor.dtype).copy_(tensor)

    def new_report(self) -> torch.Tensor:
        """See Gpu."""
        return torch.empty((_PROGRAMS, REPORT_FIELDS), dtype=torch.int64, pin_memory=True)

    def settle(self) -> None:
        """See Gpu."""
        torch.cuda.synchronize(self.device)

    def new_report_in_graph(self) -> torch.Tensor:
        """See Gpu."""
        return torch.empty((_PROGRAMS, REPORT_FIELDS), dtype=torch.int64, device=self.device)

    def copy_of_report(self, report: torch.Tensor) -> torch.Tensor:
        """See Gpu."""
        return self.new_report().copy_(report, non_blocking=True)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Gpu."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)

    def captured(
        self, forward: Callable[[], _T], capture: Capture
    ) -> tuple[Callable[[], None], _T]:
        """See Gpu."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device):
            caller = torch.cuda.current_stream(self.device)
            stream.wait_stream(caller)
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    with capture.warming_up():
                        forward()
            # Meanwhile tables are registered by other threads, and events are asked for by any.
            captured = torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed")
            with captured, capture.running():
                result = forward()
            caller.wait_stream(stream)
        return graph.replay, result


def _check_is_ours() -> None:
    capture = capture_here()
    if capture is None or not capture.is_running:
        raise ValueError(
            "a CUDA graph is captured by hand around lookups of the host's tables: its replays "
            "would not keep the rows of a version as they are. Capture the forward by "
            "torchrec_bls.CapturedForward(model, batch)"
        )


def gpu_of(device: torch.device) -> Gpu:
    """Returns a GPU of this process, the same for all that ask.

    Args:
        device: a device of type "cuda". Without an index it is the current one.

    Raises:
        ValueError: this process has no such GPU, or lacks what kernels for it take; the text says
            what to do.
    """
    index = device.index
    if index not in _gpus:
        lacking = _lacking(device)
        if lacking:
            raise ValueError(
                f"outputs can't be on the device '{device}': {lacking}. Or look up on the CPU: "
                "shard with device=torch.device('cpu')"
            )
        made = CudaGpu(device)
        index = made.device.index
        _gpus.setdefault(index, made)
    return _gpus[index]


def _lacking(device: torch.device) -> str:
    """Returns what a GPU needs and this process lacks, and what to do; empty if there is all."""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA: install a build for CUDA, see "
            "https://pytorch.org/get-started"
        )
    if torch.cuda._is_in_bad_fork():
        return (
            "CUDA was begun before this process was forked: start processes by spawn or forkserver"
        )
    count = torch.cuda.device_count()
    if count == 0:
        return (
            "CUDA finds no GPU here: look at nvidia-smi, and at CUDA_VISIBLE_DEVICES, which has to "
            "name an instance of a GPU in MIG mode"
        )
    if (device.index or 0) >= count:
        return f"this process sees {count} GPUs: see CUDA_VISIBLE_DEVICES"
    if importlib.util.find_spec("triton") is None:
        return "kernels for it take Triton: python -m pip install triton"
    return ""

"""A CUDA that registers host memory as the driver does, and fails where it is told to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch

from torchrec_bls.direct.gpu.cuda import (
    NOT_REGISTERED,
    READ_ONLY,
    READ_ONLY_SUPPORTED,
    SAME_ADDRESSES,
)
from torchrec_bls.direct.gpu.report import new_report

OUT_OF_MEMORY, ALREADY_REGISTERED = 2, 712


class FakeCuda:
    """See Cuda.

    Attributes:
        registered: bytes that are registered, by address.
        latched: the last code that was not 0, until somebody asks for it. A launch raises it.
        calls: number of calls of each method.
        trace: what happened, in its order.
    """

    def __init__(
        self, failing: Collection[tuple[str, int]] = (), attributes: dict[int, int] | None = None
    ) -> None:
        """Calls in `failing` fail: a method, and the how manieth call it is, from 0 on."""
        self.registered: dict[int, int] = {}
        self.latched = 0
        self.calls: Counter[str] = Counter()
        self.trace: list[str] = []
        self._failing = set(failing)
        self._attributes = attributes or {READ_ONLY_SUPPORTED: 1, SAME_ADDRESSES: 1}

    def register(self, address: int, size: int, flags: int) -> int:
        assert flags == READ_ONLY and size > 0
        if any(at < address + size and address < at + of for at, of in self.registered.items()):
            return self._told("register", ALREADY_REGISTERED)
        code = self._told("register", 0)
        if code == 0:
            self.registered[address] = size
        return code

    def unregister(self, address: int) -> int:
        code = self._told("unregister", 0 if address in self.registered else NOT_REGISTERED)
        if code == 0:
            del self.registered[address]
        return code

    def attribute(self, number: int) -> int:
        self.calls["attribute"] += 1
        return self._attributes.get(number, 0)

    def forget_error(self) -> int:
        code, self.latched = self.latched, 0
        return code

    def error_name(self, code: int) -> str:
        return {1: "cudaErrorInvalidValue", 2: "cudaErrorMemoryAllocation"}.get(code, "cudaError")

    def driver(self) -> str:
        return "13.0"

    def _told(self, method: str, code: int) -> int:
        number = self.calls[method]
        self.calls[method] += 1
        self.trace.append(method)
        if (method, number) in self._failing:
            code = OUT_OF_MEMORY
        if code:
            self.latched = code
        return code


class FakeEvent:
    """An event that the GPU has not reached yet."""

    def __init__(self, cuda: FakeCuda, fails: bool = False) -> None:
        self._cuda = cuda
        self._fails = fails

    def synchronize(self) -> None:
        self._cuda.trace.append("synchronize")
        if self._fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def query(self) -> bool:
        return True


class FakeGpu:
    """See Gpu. It reads by the CPU, at once.

    Attributes:
        of_host: addresses of tensors that a kernel of a GPU could not reach.
        copies: copies of outputs, by the addresses of their memory.
        outputs: tensors of the host that were made for outputs, by the addresses of their memory.
    """

    device = torch.device("cpu")

    def __init__(self, failing: Collection[tuple[str, int]] = ()) -> None:
        self.cuda = FakeCuda(failing)
        self.of_host: set[int] = set()
        self.copies: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, torch.Tensor] = {}

    @contextmanager
    def reading(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        used = {tensor.data_ptr() for tensor in tensors if tensor.numel()}
        assert not used & self.of_host, "not copied to the GPU"
        assert not self.cuda.latched
        self.cuda.trace.append("read")
        yield

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def empty_output(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        output = torch.empty(shape, dtype=dtype)
        if output.numel():
            self.outputs[_memory(output)] = output
        return output

    def copy_of_output(self, output: torch.Tensor) -> torch.Tensor:
        assert _memory(output) not in self.copies
        self.cuda.trace.append("copy" if _memory(output) in self.outputs else "copy of a copy")
        copy = output.clone()
        if copy.numel():
            self.copies[_memory(copy)] = copy
        return copy

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is (a part of) a copy of an output, or has no memory."""
        return not tensor.numel() or _memory(tensor) in self.copies

    def mark(self) -> FakeEvent:
        return FakeEvent(self.cuda)

    def new_report(self) -> torch.Tensor:
        return new_report(2, self.device)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

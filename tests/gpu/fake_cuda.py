"""A CUDA that registers host memory as the driver does, and fails where it is told to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrec import KeyedJaggedTensor

from torchrec_bls.direct.gpu.capture import Capture
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
        is_busy: whether events that nobody waits for do not come.
        calls: number of calls of each method.
        trace: what happened, in its order.
    """

    def __init__(
        self, failing: Collection[tuple[str, int]] = (), attributes: dict[int, int] | None = None
    ) -> None:
        """Calls in `failing` fail: a method, and the how manieth call it is, from 0 on."""
        self.registered: dict[int, int] = {}
        self.latched = 0
        self.is_busy = False
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
    """An event that the GPU reaches at once, unless it is busy."""

    def __init__(self, cuda: FakeCuda, fails: bool = False) -> None:
        self._cuda = cuda
        self._fails = fails
        self._has_come = False

    def synchronize(self) -> None:
        self._cuda.trace.append("synchronize")
        if self._fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._has_come = True

    def query(self) -> bool:
        self._has_come |= not self._cuda.is_busy
        return self._has_come


# What makes the host wait for a tensor of a GPU.
_WAITS = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__")


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
        # By the address of their memory: tensors of this GPU, and what kernels find in them.
        self._own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._reports: set[int] = set()
        # Of the graph that is captured or replayed, and how many of them its launches have by then.
        self._in_graph: list[torch.Tensor] = []
        self._place = 0
        self._is_reading = False

    @contextmanager
    def reading(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        used = list(tensors)
        addresses = {tensor.data_ptr() for tensor in used if tensor.numel()}
        assert not addresses & self.of_host, "not copied to the GPU"
        assert not self.cuda.latched
        self.cuda.trace.append("read")
        pairs = [self._own[_memory_of(each)] for each in used if self.has(each)]
        hidden = [(shown, true) for shown, true in pairs if shown is not true]
        before = [shown.clone() for shown, _ in hidden]
        self._is_reading = True
        try:
            for shown, true in hidden:
                shown.copy_(true)
            yield
        finally:
            self._is_reading = False
            for (shown, _), what in zip(hidden, before, strict=True):
                shown.copy_(what)

    def with_batch(self, batch: KeyedJaggedTensor, hides: bool = True) -> KeyedJaggedTensor:
        """Returns a batch that is on this GPU. Where it `hides`, the host sees other ids and
        weights in it than kernels."""
        weights = batch.weights_or_none()
        return KeyedJaggedTensor(
            keys=batch.keys(),
            values=self._with(batch.values(), -7 if hides else None),
            weights=None if weights is None else self._with(weights, -7 if hides else None),
            lengths=self._with(batch.lengths(), None),
            length_per_key=batch.length_per_key_or_none(),
        )

    def _with(self, tensor: torch.Tensor, shown: int | None) -> torch.Tensor:
        # One more, so that it has memory.
        own = tensor.new_empty(tensor.numel() + 1)[:-1].copy_(tensor)
        self._own[_memory_of(own)] = own, tensor.clone()
        return own if shown is None else own.fill_(shown)

    def has(self, tensor: torch.Tensor) -> bool:
        return _memory_of(tensor) in self._own

    @contextmanager
    def not_waited_for(self) -> Iterator[None]:
        """A context in which the host may read no tensor but reports."""
        with ExitStack() as patched:
            for name in _WAITS:
                patched.enter_context(mock.patch.object(torch.Tensor, name, self._refusing(name)))
            yield

    def _refusing(self, name: str) -> Any:
        there = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._is_reading:
                assert tensor.data_ptr() in self._reports, f"the host waits by {name}"
            return there(tensor, *args, **kwargs)

        return read

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def empty_output(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        output = torch.empty(shape, dtype=dtype)
        if output.numel():
            self.outputs[_memory_of(output)] = output
        return output

    def copy_of_output(self, output: torch.Tensor) -> torch.Tensor:
        assert _memory_of(output) not in self.copies
        self.cuda.trace.append("copy" if _memory_of(output) in self.outputs else "copy of a copy")
        copy = output.clone()
        if copy.numel():
            self.copies[_memory_of(copy)] = copy
        return copy

    def has_copied(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor is (a part of) a copy of an output, or has no memory."""
        return not tensor.numel() or _memory_of(tensor) in self.copies

    def mark(self) -> FakeEvent:
        return FakeEvent(self.cuda)

    def new_report(self) -> torch.Tensor:
        report = new_report(2, self.device)
        self._reports.add(report.data_ptr())
        return report

    def settle(self) -> None:
        self.cuda.trace.append("settle")

    def new_report_in_graph(self) -> torch.Tensor:
        if self._place == len(self._in_graph):
            self._in_graph.append(new_report(2, self.device))
        self._place += 1
        return self._in_graph[self._place - 1]

    def copy_of_report(self, report: torch.Tensor) -> torch.Tensor:
        return self.new_report().copy_(report)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        # One more, so that it has memory.
        own = tensor.new_empty(tensor.numel() + 1)[:-1].view(tensor.shape)
        self._own[_memory_of(own)] = own, own
        return own

    def captured(
        self, forward: Callable[[], Any], capture: Capture
    ) -> tuple[Callable[[], None], Any]:
        """Runs the forward anew for each replay, and copies its output to that of the first run.
        Its lookups do what they do while a graph is captured, and ask for nothing else."""
        on_gpu = _OnGpu(self)
        with capture.warming_up(), on_gpu:
            forward()
        reports = self._in_graph = []
        self._place = 0
        with capture.running(), on_gpu:
            result = forward()
        lookups = capture.lookups

        def replay() -> None:
            self._in_graph, self._place = reports, 0
            with torch.no_grad(), capture.running(), on_gpu:
                again = forward()
            assert len(capture.lookups) == len(lookups)
            capture.lookups = lookups
            for own, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                own.copy_(new)

        return replay, result


class _OnGpu(TorchDispatchMode):
    """Has what is computed of a fake GPU's tensors on that as well, as torch does."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if any(map(self._gpu.has, given)):
            for each in tree_leaves(found):
                if isinstance(each, torch.Tensor) and not self._gpu.has(each):
                    self._gpu._own[_memory_of(each)] = each, each
        return found


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

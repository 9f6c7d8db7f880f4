"""CUDA as the probe calls it: single calls by their codes, and torch for what runs on the GPU."""

import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

#: Of cudaHostRegister: memory that the GPU only reads.
READ_ONLY = 8

#: cudaDeviceAttr of driver_types.h; cuda.h has the same numbers.
ATTRIBUTES = {
    "PageableMemoryAccess": 88,
    "CanUseHostPointerForRegisteredMem": 91,
    "HostRegisterSupported": 99,
    "PageableMemoryAccessUsesHostPageTables": 100,
    "HandleTypePosixFileDescriptorSupported": 103,
    "HostRegisterReadOnlySupported": 113,
    "HostNumaId": 134,
    "HostNumaVirtualMemoryManagementSupported": 141,
}

# Cycles that the GPU waits, so that all launches of a sample are queued when the first one runs:
# about 2 ms, and 10 ms.
_SHORT_WAIT, _LONG_WAIT = 4_000_000, 20_000_000


class CudaError(RuntimeError):
    """A call returned a code. `code` and `name` are CUDA's."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{function} returned {code} ({name})")
        self.code, self.name = code, name


class Runtime:
    """The GPU of this process. Creating one makes a CUDA context."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        torch.zeros(1, device=self.device)  # torch's context, which the driver's calls need
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._runtime = ctypes.CDLL(_loaded_runtime())

    def call(self, function: str, *arguments: Any) -> int:
        """The code that one function of CUDA's runtime or driver returns."""
        if function.startswith("cudaHost"):  # as the package would
            return int(getattr(torch.cuda.cudart(), function)(*arguments))
        library = self._runtime if function.startswith("cuda") else self._driver
        return int(getattr(library, function)(*arguments))

    def check(self, function: str, *arguments: Any) -> None:
        """Calls a function; a code that is not 0 is a CudaError."""
        if code := self.call(function, *arguments):
            # The runtime keeps the code as well: the next launch would raise it.
            self.call("cudaGetLastError")
            raise CudaError(function, code, self.error_name(code))

    def give_back(self, function: str, *arguments: Any) -> None:
        """Calls what frees something, and once more if it fails: one failure leaves nothing."""
        if self.call(function, *arguments):
            self.call("cudaGetLastError")
            self.check(function, *arguments)

    def register(self, address: int, size: int, piece: int, flags: int) -> ExitStack:
        """Registers memory piece by piece, all of it or none. Closing the result undoes it."""
        with ExitStack() as pieces:
            for at in range(address, address + size, piece):
                self.check("cudaHostRegister", at, min(piece, address + size - at), flags)
                pieces.callback(self.give_back, "cudaHostUnregister", at)
            return pieces.pop_all()

    def device_pointer(self, address: int) -> int:
        """Where the GPU has registered memory."""
        found = ctypes.c_uint64()
        arguments = ctypes.byref(found), ctypes.c_void_p(address), ctypes.c_uint(0)
        self.check("cuMemHostGetDevicePointer_v2", *arguments)
        return found.value

    def attribute(self, name: str) -> int | str:
        """A device attribute, or why there is none."""
        found = ctypes.c_int()
        try:
            self.check("cuDeviceGetAttribute", ctypes.byref(found), ATTRIBUTES[name], 0)
        except CudaError as error:
            return str(error)
        return found.value

    def error_name(self, code: int) -> str:
        """CUDA's name of a code."""
        name = ctypes.c_char_p()
        failed = self.call("cuGetErrorName", code, ctypes.byref(name))
        return "unknown" if failed or name.value is None else name.value.decode()

    def card(self) -> dict[str, Any]:
        """What torch says of the GPU."""
        about = torch.cuda.get_device_properties(0)
        memory = round(about.total_memory / 2**30, 1)
        return {"gpu": about.name, "sms": about.multi_processor_count, "hbm_gib": memory}

    def free_hbm(self) -> int:
        """Bytes of the GPU's memory that no process has."""
        return torch.cuda.mem_get_info()[0]

    def synchronize(self) -> None:
        """Waits until the GPU has done all that it was asked for."""
        torch.cuda.synchronize()

    def moved(self, features: Any) -> Any:
        """A batch of ids on the GPU, whose numbers of ids the host knows."""
        return features.to(self.device)

    @contextmanager
    def refusing_to_wait(self) -> Iterator[None]:
        """A context in which whatever makes the host wait for the GPU is an error."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def view(self, address: int, count: int) -> torch.Tensor:
        """The int64 words at an address of the GPU. It keeps nothing alive."""
        return words_at(address, count, self.device)

    def pinned(self, count: int) -> torch.Tensor:
        """Words in memory of CUDA's own, which copies read without a stop."""
        return torch.zeros(count, dtype=torch.int64, pin_memory=True)

    def gather(self, rows: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, blocks: int) -> None:
        """Copies rows by so many blocks of a Triton kernel."""
        from benchmarks.gpu.kernel import gather

        gather(rows, ids, out, blocks)

    def times_us(self, calls: Sequence[Callable[[], Any]]) -> list[float]:
        """Microseconds of each of the calls on the GPU, one after the other."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        torch.cuda.synchronize()
        torch.cuda._sleep(_SHORT_WAIT)
        marks[0].record()
        for call, mark in zip(calls, marks[1:], strict=True):
            call()
            mark.record()
        torch.cuda.synchronize()
        return [1e3 * a.elapsed_time(b) for a, b in pairwise(marks)]

    def together_us(
        self, calls: Sequence[Callable[[], Any]], beside: Sequence[Callable[[], Any]]
    ) -> tuple[float, float]:
        """Microseconds of all `calls`, whose stream has priority, and of all those beside them.

        Both begin at one time.
        """
        gate = torch.cuda.Event()
        streams = torch.cuda.Stream(priority=-1), torch.cuda.current_stream()
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in streams]
        torch.cuda.synchronize()
        torch.cuda._sleep(_LONG_WAIT)
        gate.record()
        for stream, each, (begin, end) in zip(streams, (calls, beside), marks, strict=True):
            with torch.cuda.stream(stream):
                stream.wait_event(gate)
                begin.record()
                for call in each:
                    call()
                end.record()
        torch.cuda.synchronize()
        first, second = (1e3 * begin.elapsed_time(end) for begin, end in marks)
        return first, second


def words_at(address: int, count: int, device: torch.device) -> torch.Tensor:
    """The int64 words at an address. The tensor keeps nothing alive."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, 8 * count)
    return torch.empty(0, dtype=torch.int64, device=device).set_(storage)


def _loaded_runtime() -> str:
    """The CUDA runtime that torch has loaded: another one would keep codes of its own."""
    found = re.search(r"/\S*libcudart\.so\S*", Path("/proc/self/maps").read_text())
    return found.group() if found else f"libcudart.so.{str(torch.version.cuda).split('.')[0]}"

"""A CUDA that registers and maps host memory as the driver does, and fails where it is told to."""

from __future__ import annotations

import mmap
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import facts, gathers
from benchmarks.gpu.memory import NAME, _libc, _map
from benchmarks.gpu.runtime import READ_ONLY, Runtime
from torchrec_bls.direct.gpu.device import gpu_of

INVALID_VALUE, ALREADY_REGISTERED, NOT_REGISTERED, NOT_SUPPORTED = 1, 712, 713, 801
_NAMES = {
    1: b"CUDA_ERROR_INVALID_VALUE",
    2: b"CUDA_ERROR_OUT_OF_MEMORY",
    801: b"CUDA_ERROR_NOT_SUPPORTED",
}


@dataclass(frozen=True)
class Fault:
    """The `at`-th call of a function, from 0 on, and the following ones up to `times` fail."""

    function: str
    at: int = 0
    code: int = 2
    times: int = 1


class FakeCuda(Runtime):
    """The driver of a GPU that reads host memory by the CPU.

    Read-only mappings don't register: by default with code 1, with the flag with code 801. A code
    of the runtime stays until it is asked for, and until then a launch raises it.
    """

    device = torch.device("cpu")

    def __init__(self, faults: Sequence[Fault] = (), wrong: bool = False) -> None:
        self.faults, self.wrong = faults, wrong
        self.calls: Counter[str] = Counter()
        self.registered: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.handles: set[int] = set()
        self.latched = 0

    def call(self, function: str, *arguments: Any) -> int:
        code = self._fault(function)
        if code and function == "cudaGetLastError":  # forgets all the same
            self.latched = 0
        code = code or getattr(self, f"_{function}")(*arguments)
        if function.startswith("cudaHost") and code:
            self.latched = code
        return int(code)

    def left(self) -> dict[str, Any]:
        """What is still registered, mapped or open in this process."""
        files = [
            str(each.readlink())
            for each in Path("/proc/self/fd").iterdir()
            if each.is_symlink() and NAME in str(each.readlink())
        ]
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if NAME in line]
        of_driver = {"registered": self.registered, "reserved": self.reserved}
        return {**of_driver, "handles": self.handles, "files": files, "maps": maps}

    def _fault(self, function: str) -> int:
        at = self.calls[function]
        self.calls[function] += 1
        for fault in self.faults:
            if fault.function == function and fault.at <= at < fault.at + fault.times:
                return fault.code
        return 0

    # Calls of the runtime.

    def _cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        rights = self._rights(address, size)
        if not rights:
            return INVALID_VALUE
        if any(at < address + size and address < at + of for at, of in self.registered.items()):
            return ALREADY_REGISTERED
        if flags & READ_ONLY:
            return NOT_SUPPORTED
        if "w" not in rights:
            return INVALID_VALUE
        self.registered[address] = size
        return 0

    def _cudaHostUnregister(self, address: int) -> int:
        size = self.registered.pop(address, 0)
        assert not size or self._rights(address, size), "unmapped before it was unregistered"
        return 0 if size else NOT_REGISTERED

    def _cudaGetLastError(self) -> int:
        code, self.latched = self.latched, 0
        return code

    # Calls of the driver.

    def _cuGetErrorName(self, code: int, name: Any) -> int:
        name._obj.value = _NAMES.get(code)
        return 0

    def _cuDeviceGetAttribute(self, value: Any, number: int, device: int) -> int:
        value._obj.value = number
        return 0

    def _cuMemHostGetDevicePointer_v2(self, found: Any, address: Any, flags: Any) -> int:
        if not any(at <= address.value < at + size for at, size in self.registered.items()):
            return INVALID_VALUE
        found._obj.value = address.value
        return 0

    def _cuMemCreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> int:
        fd = os.memfd_create(NAME)
        os.ftruncate(fd, size.value)
        handle._obj.value = fd
        self.handles.add(fd)
        return 0

    def _cuMemExportToShareableHandle(self, fd: Any, handle: Any, kind: int, flags: Any) -> int:
        fd._obj.value = os.dup(handle.value)
        return 0

    def _cuMemImportFromShareableHandle(self, handle: Any, fd: Any, kind: int) -> int:
        handle._obj.value = os.dup(fd.value or 0)
        self.handles.add(handle._obj.value)
        return 0

    def _cuMemRelease(self, handle: Any) -> int:
        self.handles.remove(handle.value)
        os.close(handle.value)
        return 0

    def _cuMemAddressReserve(self, address: Any, size: Any, *_: Any) -> int:
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address._obj.value = _map(None, size.value, 0, kind, -1)
        self.reserved[address._obj.value] = size.value
        return 0

    def _cuMemMap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        _map(address.value, size.value, 0, mmap.MAP_SHARED | 0x10, handle.value)
        return 0

    def _cuMemSetAccess(self, address: Any, size: Any, access: Any, count: Any) -> int:
        places = {each.location.type for each in access}
        assert len(places) == count.value == 2, "the GPU and the host"
        return int(_libc.mprotect(address.value, size.value, mmap.PROT_READ | mmap.PROT_WRITE))

    def _cuMemUnmap(self, address: Any, size: Any) -> int:
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
        _map(address.value, size.value, 0, kind, -1)
        return 0

    def _cuMemAddressFree(self, address: Any, size: Any) -> int:
        assert self.reserved.pop(address.value) == size.value
        return int(_libc.munmap(address.value, size.value))

    # What torch does on a GPU.

    def card(self) -> dict[str, Any]:
        self._launch("card")
        return {"gpu": "fake", "sms": 1, "hbm_gib": 1.0}

    def free_hbm(self) -> int:
        self._launch("free_hbm")
        return 2**30 - 8 * len(self.registered)

    def synchronize(self) -> None:
        self._launch("synchronize")

    def moved(self, features: Any) -> Any:
        gpu: Any = gpu_of(torch.device("cuda", 0))
        return gpu.with_batch(features, hides=False)

    def refusing_to_wait(self) -> Any:
        self._launch("refusing_to_wait")
        return nullcontext()

    def view(self, address: int, count: int) -> torch.Tensor:
        self._launch("view")
        return super().view(address, count)

    def pinned(self, count: int) -> torch.Tensor:
        self._launch("pinned")
        return torch.zeros(count, dtype=torch.int64)

    def gather(self, rows: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, blocks: int) -> None:
        self._launch("gather")
        torch.index_select(rows, 0, ids, out=out)
        if self.wrong:
            out[0, 0] += 1

    def times_us(self, calls: Sequence[Callable[[], Any]]) -> list[float]:
        self._launch("times_us")
        return [_us([call]) for call in calls]

    def together_us(
        self, calls: Sequence[Callable[[], Any]], beside: Sequence[Callable[[], Any]]
    ) -> tuple[float, float]:
        self._launch("together_us")
        return _us(calls), _us(beside)

    def _launch(self, function: str) -> None:
        code = self._fault(function) or self.latched
        if code:
            raise RuntimeError(f"CUDA error: {code}")

    def _rights(self, address: int, size: int) -> str:
        """The rights of the mapping that holds all this memory, "" if none does."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            place = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line)
            assert place is not None
            first, last = int(place[1], 16), int(place[2], 16)
            if first <= address and address + size <= last:
                return place[3]
        return ""


def quick_cuda(faults: Sequence[Fault] = (), wrong: bool = False) -> FakeCuda:
    """A FakeCuda in a process of the probe, which copies few bytes and makes few calls there."""
    facts._COPIED, gathers._MOST = 1 << 10, 3
    return FakeCuda(faults, wrong)


def _us(calls: Sequence[Callable[[], Any]]) -> float:
    """Makes the calls. Each takes as long as any other: how many follow depends on times."""
    for call in calls:
        call()
    return 10.0 * len(calls)

"""CUDA's calls for host memory, as the registration of tables makes them."""

import ctypes
import re
from pathlib import Path
from typing import Any, Protocol

#: Of cudaHostRegister: memory that the GPU only reads.
READ_ONLY = 8
#: cudaDeviceAttr: whether an address of the host is the GPU's as well, once it is registered, and
#: whether READ_ONLY is known. Memory that is mapped read-only needs it.
SAME_ADDRESSES, READ_ONLY_SUPPORTED = 91, 113
#: cudaError: the memory was not registered.
NOT_REGISTERED = 713


class Cuda(Protocol):
    """The runtime of a GPU. Where a call returns a code of CUDA, 0 means that it succeeded."""

    def register(self, address: int, size: int, flags: int) -> int:
        """Registers bytes of the host at an address; cudaHostRegister."""

    def unregister(self, address: int) -> int:
        """Undoes `register`; cudaHostUnregister."""

    def attribute(self, number: int) -> int:
        """Returns an attribute of the GPU, 0 if CUDA does not know it."""

    def forget_error(self) -> int:
        """Returns the last code that was not 0, and forgets it: the next launch would raise it."""

    def error_name(self, code: int) -> str:
        """Returns CUDA's name of a code."""

    def driver(self) -> str:
        """Returns the newest version of CUDA that the driver knows, as "13.0"."""


class Event(Protocol):
    """A place in the work of a GPU, as torch.cuda.Event."""

    def synchronize(self) -> None:
        """Waits until the GPU is there."""

    def query(self) -> bool:
        """Returns whether the GPU is there."""


class CudaRuntime:
    """The runtime that torch has loaded, see Cuda.

    Args:
        device: number of the GPU among those that this process sees.
    """

    def __init__(self, device: int) -> None:
        import torch

        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._device = device
        # Another library would keep the last code for itself, and so torch would raise it.
        self._library = ctypes.CDLL(_loaded_runtime(str(torch.version.cuda)))
        self._library.cudaGetErrorName.restype = ctypes.c_char_p

    def register(self, address: int, size: int, flags: int) -> int:
        """See Cuda. CUDA asks for no lock of the interpreter meanwhile."""
        return self._call(
            "cudaHostRegister", ctypes.c_void_p(address), ctypes.c_size_t(size), flags
        )

    def unregister(self, address: int) -> int:
        """See Cuda."""
        return self._call("cudaHostUnregister", ctypes.c_void_p(address))

    def attribute(self, number: int) -> int:
        """See Cuda."""
        found = ctypes.c_int()
        if self._call("cudaDeviceGetAttribute", ctypes.byref(found), number, self._device):
            self.forget_error()
            return 0
        return found.value

    def forget_error(self) -> int:
        """See Cuda."""
        return int(self._library.cudaGetLastError())

    def error_name(self, code: int) -> str:
        """See Cuda."""
        name: bytes = self._library.cudaGetErrorName(code)
        return name.decode()

    def driver(self) -> str:
        """See Cuda."""
        found = ctypes.c_int()
        self._call("cudaDriverGetVersion", ctypes.byref(found))
        return f"{found.value // 1000}.{found.value % 1000 // 10}"

    def _call(self, function: str, *arguments: Any) -> int:
        import torch

        # The runtime's calls are for the current GPU of a thread.
        with torch.cuda.device(self._device):
            return int(getattr(self._library, function)(*arguments))


def _loaded_runtime(version: str) -> str:
    found = re.search(r"/\S*libcudart\.so\S*", Path("/proc/self/maps").read_text())
    return found.group() if found else f"libcudart.so.{version.partition('.')[0]}"

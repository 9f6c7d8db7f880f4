"""Host memory that CUDA makes and hands on by a descriptor (cuMemCreate), by the driver's calls."""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p

from benchmarks.gpu.memory import Mapping
from benchmarks.gpu.runtime import Runtime

#: CUmemLocationType of cuda.h.
DEVICE, HOST, HOST_NUMA = 1, 2, 3
_PINNED, _DESCRIPTOR, _READ_WRITE = 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compressionType", c_ubyte),
        ("gpuDirectRDMACapable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("requestedHandleTypes", c_int),
        ("location", _Location),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


@contextmanager
def created(runtime: Runtime, kind: int, size: int) -> Iterator[c_uint64]:
    """New host memory that can be handed on. `size` has to be a multiple of 2 MiB."""
    handle = c_uint64()
    where = _location(runtime, kind)
    properties = _Properties(_PINNED, _DESCRIPTOR, where, None, _Flags())
    unused = c_uint64(0)
    runtime.check("cuMemCreate", byref(handle), c_size_t(size), byref(properties), unused)
    with ExitStack() as stack:
        stack.callback(runtime.give_back, "cuMemRelease", handle)
        yield handle


def exported(runtime: Runtime, handle: c_uint64) -> int:
    """A descriptor of the memory, which the caller closes."""
    fd = c_int(-1)
    runtime.check("cuMemExportToShareableHandle", byref(fd), handle, _DESCRIPTOR, c_uint64(0))
    return fd.value


@contextmanager
def imported(runtime: Runtime, fd: int) -> Iterator[c_uint64]:
    """The memory of a descriptor, which stays the caller's."""
    handle = c_uint64()
    runtime.check("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), _DESCRIPTOR)
    with ExitStack() as stack:
        stack.callback(runtime.give_back, "cuMemRelease", handle)
        yield handle


@contextmanager
def mapped(runtime: Runtime, handle: c_uint64, kind: int, size: int) -> Iterator[Mapping]:
    """Maps the memory for the GPU and for this process, at one address."""
    with ExitStack() as stack:
        address, none = c_uint64(), c_uint64(0)
        length = c_size_t(size)
        reserve = (byref(address), length, c_size_t(0), none, none)
        runtime.check("cuMemAddressReserve", *reserve)
        stack.callback(runtime.give_back, "cuMemAddressFree", address, length)
        runtime.check("cuMemMap", address, length, c_size_t(0), handle, none)
        stack.callback(runtime.give_back, "cuMemUnmap", address, length)
        places = _Location(DEVICE, 0), _location(runtime, kind)
        access = (_Access * 2)(*(_Access(place, _READ_WRITE) for place in places))
        runtime.check("cuMemSetAccess", address, length, access, c_size_t(2))
        yield Mapping(address.value, size)


def _location(runtime: Runtime, kind: int) -> _Location:
    node: int | str = 0
    with suppress(ValueError):
        node = max(0, int(runtime.attribute("HostNumaId"))) if kind == HOST_NUMA else 0
    return _Location(kind, int(node))


# Checked against cuda.h's sizes when the module is imported: a wrong one would be read as garbage.
assert ctypes.sizeof(c_uint) == 4 and ctypes.sizeof(_Properties) == 32, "CUmemAllocationProp"
assert ctypes.sizeof(_Access) == 12, "CUmemAccessDesc"

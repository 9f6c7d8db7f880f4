"""What registers: host memory in each form that tables could have, read by the GPU afterwards."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu import memory
from benchmarks.gpu.memory import PRIVATE, READ, SHARED, WRITE, Mapping
from benchmarks.gpu.runtime import READ_ONLY, CudaError, Runtime

_WORDS = 32  # of a row, 256 bytes
_ROWS_READ = 4096


@dataclass(frozen=True)
class Way:
    """How memory is mapped and registered.

    Attributes:
        protection: of the mapping that is registered.
        kind: whether writes to it are shared.
        flags: of cudaHostRegister.
        file: a memory file, or anonymous memory.
        sealed: the file is sealed as the package seals tables, contents as well.
        guarded: once registered, the mapping is made read-only and the file sealed.
    """

    protection: int
    kind: int
    flags: int = 0
    file: bool = True
    sealed: bool = False
    guarded: bool = False


WAYS = {
    "sealed": Way(READ, SHARED, sealed=True),
    "sealed, read-only flag": Way(READ, SHARED, READ_ONLY, sealed=True),
    "guarded": Way(READ | WRITE, SHARED, guarded=True),
    "guarded, read-only flag": Way(READ | WRITE, SHARED, READ_ONLY, guarded=True),
    "shared, writable": Way(READ | WRITE, SHARED),
    "shared, mapped read-only": Way(READ, SHARED),
    "private copy of sealed": Way(READ | WRITE, PRIVATE, sealed=True),
    "anonymous": Way(READ | WRITE, PRIVATE | memory.ANONYMOUS, file=False),
}


def measure(
    runtime: Runtime, way: str, huge: bool, size: int, piece: int
) -> Iterator[dict[str, Any]]:
    """Registers memory in one way and reads it by the GPU.

    Args:
        runtime: CUDA.
        way: key of WAYS.
        huge: with pages of 2 MiB rather than 4 KiB.
        size: bytes in all, whole pages of 2 MiB.
        piece: bytes of one registration.

    Yields:
        The result. "error" is "" or how CUDA refused; then there are no times.
    """
    how = WAYS[way]
    with ExitStack() as stack:
        fd, mapping = prepare(stack, how, huge, size)
        found: dict[str, Any] = {"huge_share": mapping.pages()["huge"] / size}
        before = _state(runtime, mapping)
        start = time.perf_counter()
        try:
            pieces = runtime.register(mapping.address, size, piece, how.flags)
        except CudaError as error:
            yield {**found, "error": str(error), "code": error.code, "name": error.name}
            return
        gib = size / 2**30
        with pieces:
            found |= {"error": "", "s_per_gib": (time.perf_counter() - start) / gib}
            if how.guarded:
                found |= guard(mapping, fd)
            after = _state(runtime, mapping)
            found["hbm_mib_per_gib"] = (before["free_hbm"] - after["free_hbm"]) / 2**20 / gib
            found |= {"before": before, "after": after}
            pointer = runtime.device_pointer(mapping.address)
            found["same_pointer"] = pointer == mapping.address
            found |= check_rows(runtime, mapping, pointer)
            start = time.perf_counter()
            pieces.close()
            found["unregister_s_per_gib"] = (time.perf_counter() - start) / gib
        yield found


def check_rows(runtime: Runtime, mapping: Mapping, pointer: int) -> dict[str, int]:
    """Reads random rows by the GPU and by the CPU, and counts those that differ."""
    ids = torch.randint(mapping.size // (8 * _WORDS), (_ROWS_READ,))
    rows = runtime.view(pointer, mapping.size // 8).view(-1, _WORDS)
    by_gpu = rows.index_select(0, ids.to(runtime.device)).cpu()
    return {"rows": _ROWS_READ, "wrong_rows": wrong_rows(mapping, ids, by_gpu)}


def wrong_rows(mapping: Mapping, ids: torch.Tensor, found: torch.Tensor) -> int:
    """How many rows are not those that the CPU reads, which have the numbers of their words."""
    width = found.shape[1]
    there = mapping.words[: mapping.size // 8 // width * width].view(-1, width)[ids]
    numbers = ids[:, None] * width + torch.arange(width)
    return int(((found != there) | (there != numbers)).any(1).sum())


def prepare(stack: ExitStack, how: Way, huge: bool, size: int) -> tuple[int, Mapping]:
    """Filled memory as it is before it is registered."""
    if not how.file:
        anonymous = stack.enter_context(memory.mapped(-1, size, how.protection, how.kind))
        memory.write(anonymous, huge)
        return -1, anonymous
    fd = stack.enter_context(memory.filled_file(size, huge))
    if how.sealed and (error := memory.seal(fd, memory.SIZE_SEALS | memory.WRITE_SEAL)):
        raise OSError(f"cannot seal the memory file: {error}")
    mapping = stack.enter_context(memory.mapped(fd, size, how.protection, how.kind))
    mapping.advise_huge(huge)
    mapping.populate()
    return fd, mapping


def guard(mapping: Mapping, fd: int) -> dict[str, str]:
    """Takes writing away from registered memory: "" or an error's name for each step."""
    return {
        "protect": mapping.protect(READ),
        "write_seal": memory.seal(fd, memory.WRITE_SEAL),
        "size_seals": memory.seal(fd, memory.SIZE_SEALS & ~memory.fcntl.F_SEAL_SEAL),
        "future_write_seal": memory.seal(fd, memory.FUTURE_WRITE_SEAL),
    }


def _state(runtime: Runtime, mapping: Mapping) -> dict[str, int]:
    """Memory of the GPU in bytes, of the host and this process in KiB, of the mapping in bytes."""
    of_mapping = {f"mapping_{key}": value for key, value in mapping.pages().items()}
    return {
        "free_hbm": runtime.free_hbm(),
        **memory.memory_kib(),
        **memory.host_kib(),
        **of_mapping,
    }

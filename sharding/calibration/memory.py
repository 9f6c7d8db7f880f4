"""Times one thread's reading of memory, by the size of what it reads."""

from __future__ import annotations

import time
from typing import Any

import torch

ROW_BYTES = 256
_READ_BYTES = 64 * 2**20
_ROWS = 8192
_REPEATS = 5


def measure_memory(memory_bytes: int) -> dict[str, Any]:
    """Times reads of buffers from 16 KiB to 256 MiB, from end to end and in rows at random places.

    Args:
        memory_bytes: size of the largest buffer.

    Returns:
        `buffer_bytes`, `bytes_per_us` and `row_us` (see `MemoryCurve`).
    """
    torch.set_num_threads(1)
    sizes, rates, rows = [], [], []
    size = 16 * 2**10
    while size <= min(256 * 2**20, memory_bytes):
        buffer = torch.ones(size // ROW_BYTES, ROW_BYTES // 4)
        times = max(1, _READ_BYTES // size)
        sizes.append(size)
        rates.append(round(size * times / _least_us(lambda b=buffer, n=times: _read(b, n)), 1))
        anywhere = torch.randint(len(buffer), (_ROWS,))
        gather = _least_us(lambda b=buffer, i=anywhere: b.index_select(0, i))
        rows.append(round(gather / _ROWS, 5))
        size *= 2
    return {"buffer_bytes": sizes, "bytes_per_us": rates, "row_us": rows}


def _read(buffer: torch.Tensor, times: int) -> None:
    for _ in range(times):
        buffer.sum()


def _least_us(work: Any) -> float:
    work()
    least = float("inf")
    for _ in range(_REPEATS):
        start = time.thread_time_ns()
        work()
        least = min(least, (time.thread_time_ns() - start) / 1e3)
    return least

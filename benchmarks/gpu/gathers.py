"""How fast a GPU gathers rows of host memory by few blocks, beside pinned copies and a GEMM.

Rows of large tables come more slowly than those of small ones: what translates addresses between
GPU and host keeps some of the last translations. So the order of ids and the size of the memory
that they lie in are properties of a cell.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu.memory import Mapping
from benchmarks.gpu.registrations import WAYS, prepare, wrong_rows
from benchmarks.gpu.runtime import Runtime

ROW_BYTES = (256, 1024)
#: How ids follow one another: as drawn, as of so many tables one after the other, or in order.
ORDERS = {"random": 1, "26 tables": 26, "sorted": 0}
_TURNS = 5
# Beside a GEMM: how many are timed, of the GEMM and of the reads; of the other, twice the time.
_GEMMS, _READS, _MOST = 10, 8, 300


@contextmanager
def _table(
    runtime: Runtime, way: str, huge: bool, size: int, piece: int
) -> Iterator[tuple[Mapping, torch.Tensor, dict[str, Any]]]:
    """Filled and registered memory, its words as the GPU sees them, and what that took."""
    gib = size / 2**30
    how = WAYS[way]
    with ExitStack() as stack:
        start = perf_counter()
        _, mapping = prepare(stack, how, huge, size)
        found = {"fill_s_per_gib": (perf_counter() - start) / gib}
        found["huge_share"] = mapping.pages()["huge"] / size
        free, start = runtime.free_hbm(), perf_counter()
        stack.enter_context(runtime.register(mapping.address, size, piece, how.flags))
        found["register_s_per_gib"] = (perf_counter() - start) / gib
        found["hbm_mib_per_gib"] = (free - runtime.free_hbm()) / 2**20 / gib
        pointer = runtime.device_pointer(mapping.address)
        yield mapping, runtime.view(pointer, size // 8), found


def measure(
    runtime: Runtime,
    way: str,
    huge: bool,
    size: int,
    piece: int,
    moved: Sequence[int],
    block_counts: Sequence[int],
    windows: Sequence[int] = (),
    orders: Sequence[str] = ("random",),
) -> Iterator[dict[str, Any]]:
    """Gathers rows of a table, fresh ones each time, and copies as many pinned bytes.

    Args:
        runtime: CUDA.
        way: how the table is mapped and registered, key of WAYS.
        huge: with pages of 2 MiB rather than 4 KiB.
        size: bytes of the table.
        piece: bytes of one registration.
        moved: bytes that one gather reads.
        block_counts: numbers of blocks of the kernel.
        windows: bytes from the table's start on that rows are drawn from; all of it by default.
        orders: of ids, keys of ORDERS.

    Yields:
        What the table took, then a result for each cell.
    """
    with _table(runtime, way, huge, size, piece) as (mapping, words, taken):
        yield {"what": "table", **taken}
        for each in moved:
            source = runtime.pinned(each // 8)
            target = torch.empty(each // 8, dtype=torch.int64, device=runtime.device)
            copy = partial(target.copy_, source, non_blocking=True)
            runtime.times_us([copy])
            yield {"what": "pinned copy", **_rate(runtime.times_us([copy] * _TURNS), each)}
        sizes = [window for window in windows if window < size] + [size]
        for row_bytes, window, order, each, count in product(
            ROW_BYTES, sizes, orders, moved, block_counts
        ):
            rows = words[: window // 8].view(-1, row_bytes // 8)
            calls, ids, out = _gathers(runtime, rows, each, count, _TURNS, order)
            runtime.times_us(calls[:1])  # compiles
            out.fill_(-1)
            cell = _rate(runtime.times_us(calls), out.numel() * 8)
            wrong = {"rows": len(out), "wrong_rows": wrong_rows(mapping, ids[-1], out.cpu())}
            place = {"row_bytes": row_bytes, "window": window, "order": order, "blocks": count}
            yield {"what": "gather", **place, **cell, **wrong}


def measure_beside(
    runtime: Runtime,
    way: str,
    huge: bool,
    size: int,
    moved: int,
    block_counts: Sequence[int],
    side: int,
) -> Iterator[dict[str, Any]]:
    """How much slower a GEMM and reads of the host become if they run at one time.

    Args:
        runtime: CUDA.
        way: how the table is mapped and registered, key of WAYS.
        huge: with pages of 2 MiB rather than 4 KiB.
        size: bytes of the table.
        moved: bytes that one gather reads.
        block_counts: numbers of blocks of the kernel.
        side: of the GEMM's square matrices, in bfloat16.

    Yields:
        A result for each number of blocks, and one for pinned copies.
    """
    a, b, c = torch.randn(3, side, side, dtype=torch.bfloat16, device=runtime.device).unbind()
    gemm = partial(torch.matmul, a, b, out=c)
    runtime.times_us([gemm] * _GEMMS)  # clocks go up
    gemm_us = statistics.median(runtime.times_us([gemm] * _GEMMS))
    with _table(runtime, way, huge, size, size) as (_, words, _):
        source = runtime.pinned(moved // 8)
        copy = partial(torch.empty_like(source, device=runtime.device).copy_, source, True)
        reads: list[tuple[dict[str, Any], list[Callable[[], Any]]]] = [
            ({"what": "pinned copy"}, [copy] * _READS)
        ]
        for count in block_counts:
            calls, *_ = _gathers(runtime, words.view(-1, ROW_BYTES[0] // 8), moved, count, _READS)
            reads.append(({"what": "gather", "blocks": count}, calls))
        for cell, calls in reads:
            runtime.times_us(calls[:1])
            alone_us = sum(runtime.times_us(calls))
            trains = min(_MOST, math.ceil(2 * _GEMMS * gemm_us / alone_us))
            gemms = min(_MOST, math.ceil(2 * alone_us / gemm_us))
            beside_us, slower_us = [], []
            for _ in range(3):
                slower_us.append(runtime.together_us(calls * trains, [gemm] * _GEMMS)[1])
                beside_us.append(runtime.together_us(calls, [gemm] * gemms)[0])
            yield {
                **cell,
                "gb_per_s_alone": _READS * moved / alone_us / 1e3,
                "tflops_alone": 2 * side**3 / gemm_us / 1e6,
                "gemm_slower": statistics.median(slower_us) / (_GEMMS * gemm_us),
                "reads_slower": statistics.median(beside_us) / alone_us,
            }


def _gathers(
    runtime: Runtime,
    rows: torch.Tensor,
    moved: int,
    blocks: int,
    turns: int,
    order: str = "random",
) -> tuple[list[Callable[[], Any]], torch.Tensor, torch.Tensor]:
    """Gathers of so many turns with their ids, by turn, and the output that all write to."""
    ids = torch.stack([_ids(len(rows), moved // (8 * rows.shape[1]), order) for _ in range(turns)])
    out = torch.empty(ids.shape[1], rows.shape[1], dtype=torch.int64, device=runtime.device)
    there = ids.to(runtime.device)
    return [partial(runtime.gather, rows, each, out, blocks) for each in there], ids, out


def _ids(rows: int, count: int, order: str) -> torch.Tensor:
    """So many ids of rows, uniformly drawn, in one of the ORDERS."""
    tables = min(ORDERS[order], rows)
    if not tables:
        return torch.randint(rows, (count,)).sort().values
    of_table = rows // tables
    return torch.arange(count) * tables // count * of_table + torch.randint(of_table, (count,))


def _rate(samples_us: list[float], moved: int) -> dict[str, Any]:
    median = statistics.median(samples_us)
    return {"bytes": moved, "us": sorted(samples_us), "gb_per_s": moved / median / 1e3}

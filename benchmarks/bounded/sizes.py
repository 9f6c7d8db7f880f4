"""What compressors make of the lookups of a table, in bytes, and features of its rows."""

import ctypes
import ctypes.util
import heapq
import zlib
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.bounded import frames
from benchmarks.bounded.paper import WINDOWS

Codes = npt.NDArray[np.int64]  # [rows, dim]
_ZSTD_LEVEL = 1


def quantized(rows: npt.NDArray[np.float32], bound: float) -> Codes:
    """Rows on the grid of a bound."""
    return np.rint(rows / (2 * bound)).astype(np.int64)


def _numbers(rows: npt.NDArray) -> npt.NDArray[np.int64]:
    """A number for each row, the same for rows of equal bytes."""
    whole = np.dtype((np.void, rows.shape[1] * rows.itemsize))
    return np.unique(np.ascontiguousarray(rows).view(whole).ravel(), return_inverse=True)[1]


def distinct(rows: npt.NDArray) -> int:
    return int(_numbers(rows).max()) + 1


def entropy(codes: Codes) -> float:
    """Bits a value, of the codes of a table."""
    counts = np.unique(codes, return_counts=True)[1]
    return float(np.log2(codes.size) - (counts * np.log2(counts)).sum() / codes.size)


def lorenzo(codes: Codes) -> Codes:
    """What the 2x2 predictor leaves: differences from left, up, and their common neighbour."""
    padded = np.pad(codes, ((1, 0), (1, 0)))
    return np.diff(np.diff(padded, axis=0), axis=1)


def vector_lz(codes: Codes, windows: Sequence[int]) -> list[int]:
    """A byte for a row that one of a window's rows before it equals, else one and its codes.

    So a row of 32 that is new takes 33 bytes, a ratio of 3.88, the least in the paper's Table V.
    """
    numbers = _numbers(codes)
    order = np.argsort(numbers, kind="stable")
    back = np.diff(order)[np.diff(numbers[order]) == 0]
    row = codes.shape[1] * _packed(codes).itemsize
    return [len(codes) + (len(codes) - int((back <= window).sum())) * row for window in windows]


def huffman(codes: Codes) -> int:
    """One code for all values, at least a bit each, and two bytes to describe each symbol."""
    counts = np.unique(codes, return_counts=True)[1].tolist()
    symbols, bits = len(counts), codes.size if len(counts) == 1 else 0
    heapq.heapify(counts)
    while len(counts) > 1:
        both = heapq.heappop(counts) + heapq.heappop(counts)
        bits += both
        heapq.heappush(counts, both)
    return -(-bits // 8) + 2 * symbols


def _packed(codes: Codes) -> npt.NDArray:
    return codes.astype(np.int8 if np.abs(codes).max() < 128 else np.int16)


@cache
def _zstd() -> ctypes.CDLL | None:
    name = ctypes.util.find_library("zstd")
    return None if name is None else ctypes.CDLL(name)


def _zstd_size(library: ctypes.CDLL, data: bytes) -> int:
    room = ctypes.c_size_t(2 * len(data) + 1024)
    out = ctypes.create_string_buffer(room.value)
    compress = library.ZSTD_compress
    compress.restype = ctypes.c_size_t
    return compress(out, room, data, ctypes.c_size_t(len(data)), _ZSTD_LEVEL)


def of_table(codes: Codes) -> dict[str, int]:
    """Bytes by compressor that does not know the ids; zstd where it is installed."""
    data, library = _packed(codes).tobytes(), _zstd()
    sent = vector_lz(codes, WINDOWS)
    found = {f"window {window}": size for window, size in zip(WINDOWS, sent, strict=True)}
    found |= {"Huffman": huffman(codes), "zlib": len(zlib.compress(data))}
    return found if library is None else {**found, "zstd": _zstd_size(library, data)}


def ours(
    lookups: torch.Tensor, ids: npt.NDArray[np.int64], bounds: Sequence[float]
) -> list[dict[str, int]]:
    """Bytes of each table in our frames: without ids, with them, and with them in fixed width."""
    data, groups = frames.room(lookups), frames.groups_of(ids)
    ways = {
        "ours": (None, False),
        "with ids": (groups, False),
        "fixed width": (groups, True),
    }

    def size(table: int, known: frames.Groups | None, fixed_width: bool) -> int:
        frame = frames.frame(lookups, bounds, known, fixed_width, only=table)
        return frames.encode(frame, data) - frames.HEAD_BYTES

    return [{way: size(t, *how) for way, how in ways.items()} for t in range(len(bounds))]

"""Codecs of rows against FBGEMM's row-wise ones and memcpy, one thread, in one run."""

import ctypes
import itertools
import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import fbgemm_gpu  # noqa: F401  registers torch.ops.fbgemm
import torch

from benchmarks.codecs.page import section
from benchmarks.harness import record
from benchmarks.harness.launch import pin_to_core
from benchmarks.harness.statistics import in_turns
from torchrec_bls import _native
from torchrec_bls.codecs.rows import Codec

BATCH, TABLES, DIM = 2048, 26, 64
BITS = {Codec.UINT8: 8, Codec.UINT4: 4, Codec.UINT2: 2}
# All columns of a sample as one row, or one row for each table.
COLUMNS = [TABLES * DIM, DIM]
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

Call = Callable[[], object]


def keep_memory() -> None:
    """Has glibc keep freed memory of any size, so that no call pays for new pages."""
    libc = ctypes.CDLL(None)
    for option, value in ((_M_MMAP_THRESHOLD, 1 << 25), (_M_TRIM_THRESHOLD, 1 << 30)):
        if libc.mallopt(option, value) != 1:
            raise RuntimeError(f"mallopt({option}, {value}) failed")


def fbgemm_calls(rows: torch.Tensor, out: torch.Tensor, bits: int) -> dict[str, Call]:
    """Returns FBGEMM's encoder and decoder. Those of 8 bits write to given memory, as ours do;
    those of 4 and 2 bits have no such variant and allocate, see `keep_memory`."""
    ops = torch.ops.fbgemm
    if bits == 8:
        encoded = ops.FloatToFused8BitRowwiseQuantized(rows)
        other = torch.empty_like(encoded)
        return {
            "encode": lambda: ops.FloatToFused8BitRowwiseQuantizedOut(other, rows),
            "decode": lambda: ops.Fused8BitRowwiseQuantizedToFloatOut(out, encoded),
        }
    encoded = ops.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, bits)
    return {
        "encode": lambda: ops.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, bits),
        "decode": lambda: ops.FusedNBitRowwiseQuantizedSBHalfToFloat(encoded, bits),
    }


def our_calls(rows: torch.Tensor, out: torch.Tensor, codec: Codec) -> dict[str, Call]:
    """Returns our encoder and decoder, between given memory."""
    encoded = torch.empty(_native.max_encoded_bytes(codec, *rows.shape), dtype=torch.uint8)
    arrived = encoded[: _native.encode_rows(codec, rows, encoded)]
    return {
        "encode": lambda: _native.encode_rows(codec, rows, encoded),
        "decode": lambda: _native.decode_rows(codec, arrived, out),
    }


def cells(values: torch.Tensor, out: torch.Tensor) -> Iterator[tuple[dict[str, Any], Call]]:
    yield {"peer": "memcpy"}, lambda: out.copy_(values)
    for (codec, bits), columns in itertools.product(BITS.items(), COLUMNS):
        rows, to = values.view(-1, columns), out.view(-1, columns)
        peers = {"ours": our_calls(rows, to, codec), "FBGEMM": fbgemm_calls(rows, to, bits)}
        for peer, of_peer in peers.items():
            for direction, call in of_peer.items():
                yield {"peer": peer, "bits": bits, "columns": columns, "direction": direction}, call


def measure(turns: int) -> list[dict[str, Any]]:
    """Returns each cell with its speed: GB of float32 a second, all cells in random order."""
    keep_memory()
    torch.set_num_threads(1)
    pin_to_core(0)
    values = torch.randn(BATCH, TABLES * DIM, generator=torch.Generator().manual_seed(0))
    measured = list(cells(values, torch.empty_like(values)))
    faults = [0] * len(measured)

    def speed(index: int, call: Call) -> float:
        call()  # whatever ran before has filled the caches
        faults_before = _page_faults()
        begin = time.perf_counter()
        call()
        seconds = time.perf_counter() - begin
        faults[index] += _page_faults() - faults_before
        return values.nbytes / 1e9 / seconds

    timed = {index: partial(speed, index, call) for index, (_, call) in enumerate(measured)}
    speeds = in_turns(timed, turns, "turns")
    return [
        cell | {"gb_per_s": speeds[index], "page_faults_per_call": faults[index] / turns}
        for index, (cell, _) in enumerate(measured)
    ]


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--turns", type=int, default=200, help="calls of each (%(default)s)")
    arguments = parser.parse_args()
    before = record.environment()
    settings = {"batch": BATCH, "tables": TABLES, "dim": DIM, "turns": arguments.turns}
    results = measure(arguments.turns)
    record.publish(arguments.json, "codecs", before, settings, results, section)


if __name__ == "__main__":
    main()

"""What all kernels do with rows: read them, add them up, and tell which id has none."""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from torchrec_bls.direct.gpu.report import REPORT_FIELDS
from torchrec_bls.direct.gpu.strips import FIELDS, Strips

#: Where no id is: behind all.
NOWHERE = tl.constexpr(1 << 62)
#: Numbers of a strip, for kernels.
STRIP = tl.constexpr(FIELDS)
_REPORT = tl.constexpr(REPORT_FIELDS)

# Numbers of a tile: as floats 16 KiB, so that eight programs ask for more than PCIe has under way.
# A program takes half of the registers of an SM then.
_NUMBERS_AT_ONCE = 4096
# Words that a thread reads at once, and most warps of a program.
_WORDS_OF_THREAD = 4
_MOST_WARPS = 8


def tile_of(strips: Strips, out: torch.Tensor) -> dict[str, Any]:
    """Returns what a kernel knows of a launch when it is compiled, and the options of that.

    Nothing of it depends on the size of a batch: each new one would be compiled in the middle of
    serving. Products are fused with sums where the kernel says so, as on the CPU, and nowhere else.
    """
    words: int = triton.next_power_of_2(strips.words)
    rows = max(1, _NUMBERS_AT_ONCE // (words * (32 // strips.bits)))
    warps = rows * words // (32 * _WORDS_OF_THREAD)
    return {
        "BITS": strips.bits,
        "ROWS": rows,
        "WORDS": words,
        "ALIGNMENT": strips.alignment,
        "STORED": math.gcd(strips.out_alignment, out.stride(0), out.data_ptr() // out.itemsize),
        "num_warps": min(_MOST_WARPS, max(1, warps)),
        "enable_fp_fusion": False,
    }


@triton.jit
def read_words(base, row, here, words, WORDS: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Words of rows, int32 [rows, WORDS], 0 behind their ends. Of rows that are not `here`, nothing
    is read."""
    start = (base + row * (words * 4)).to(tl.pointer_type(tl.int32))
    start = tl.multiple_of(start, ALIGNMENT)
    word = tl.arange(0, WORDS)[None, :]
    return tl.load(start[:, None] + word, mask=here[:, None] & (word < words), other=0)


@triton.jit
def add_rows(sums, read, weight, BITS: tl.constexpr, WEIGHTED: tl.constexpr):
    """Sums with the numbers of rows added, float32 [rows, WORDS x numbers of a word], to the bits
    of sum_bags in csrc and of FBGEMM's kernels. What a row has in front becomes numbers as well."""
    NUMBERS: tl.constexpr = 32 // BITS
    if BITS == 32:
        value = read.to(tl.float32, bitcast=True)
    else:
        if BITS == 16:
            halves = tl.join(read.to(tl.int16), (read >> 16).to(tl.int16))
            each = halves.to(tl.float16, bitcast=True).to(tl.float32)
        else:
            shifted = read[:, :, None] >> (tl.arange(0, NUMBERS)[None, None, :] * BITS)
            each = (shifted & ((1 << BITS) - 1)).to(tl.float32)
        value = tl.reshape(each, [read.shape[0], read.shape[1] * NUMBERS])
    if BITS <= 8:
        # The first word is in one of several threads that have the row.
        is_first = tl.arange(0, read.shape[1])[None, :] == 0
        first = tl.sum(tl.where(is_first, read, 0), axis=1)
        scale = first.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        shift = (first >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        if WEIGHTED:
            scale = scale * weight
            shift = shift * weight
        added = tl.fma(value, scale[:, None], sums + shift[:, None])
    elif WEIGHTED:
        added = tl.fma(value, weight[:, None], sums)
    else:
        added = sums + value
    return added


@triton.jit
def store_numbers(to, numbers, columns, there, BITS: tl.constexpr):
    """Stores [rows, WORDS x numbers of a word] at the addresses of rows of the output, without what
    a row has in front."""
    IN_FRONT: tl.constexpr = 32 // BITS if BITS <= 8 else 0
    column = tl.arange(0, numbers.shape[1]) - IN_FRONT
    kept = (column >= 0) & (column < columns)
    tl.store(to[:, None] + column[None, :], numbers, mask=there[:, None] & kept[None, :])


@triton.jit
def tell(report, ids, size, key, position):
    """Writes a program's first bad id, of which the key is -1 if it has none. Each program has a
    place of its own, so that none waits."""
    bad = tl.load(ids + position, mask=position < size, other=0).to(tl.int64)
    slot = report + tl.program_id(0) * _REPORT
    tl.store(slot, key)
    tl.store(slot + 1, position)
    tl.store(slot + 2, bad)

"""Pooled rows, with the bits of csrc/lookup/direct/direct_sums.cpp and of FBGEMM's CPU kernels."""

import torch
import triton
import triton.language as tl

from torchrec_bls.direct.gpu.kernels.rows import (
    NOWHERE,
    STRIP,
    add_rows,
    read_words,
    store_numbers,
    tell,
    tile_of,
)
from torchrec_bls.direct.gpu.strips import Strips


@triton.jit(do_not_specialize=["size", "samples", "count"])
def _sum_bags(
    ids,
    offsets,
    weights,
    strips,
    addresses,
    out,
    report,
    size,
    samples,
    count,
    out_stride,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    STORED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    NUMBERS: tl.constexpr = WORDS * (32 // BITS)
    tiles = (samples + ROWS - 1) // ROWS  # of a strip
    bad_key = tl.full([], -1, tl.int64)
    bad_position = tl.full([], NOWHERE, tl.int64)
    size = size.to(tl.int64)
    tile = tl.program_id(0)
    # No range: Triton 3.6 interprets it with NumPy before 2.4 alone.
    while tile < count * tiles:
        strip = strips + tile // tiles * STRIP
        key = tl.load(strip)
        out_column = tl.multiple_of(tl.load(strip + 1), STORED)
        columns = tl.multiple_of(tl.load(strip + 2), STORED)
        words = tl.multiple_of(tl.load(strip + 3), ALIGNMENT // 4)
        rows = tl.load(strip + 4)
        rows_per_block = tl.load(strip + 5)
        means = tl.load(strip + 6) != 0
        blocks = tl.load(strip + 7)
        first_block = tl.load(strip + 8)
        bag = (tile % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        there = bag < samples
        place = offsets + key * samples + bag
        begin = tl.load(place, mask=there, other=0).to(tl.int64)
        end = tl.load(place + 1, mask=there, other=0).to(tl.int64)
        bad_in_bag = tl.full([ROWS], NOWHERE, tl.int64)
        is_outside = (begin < 0) | (begin > end) | (end > size)
        bad_in_bag = tl.where(is_outside, size, bad_in_bag)
        end = tl.where(is_outside, begin, end)
        longest = tl.max(end - begin, axis=0)
        total = tl.zeros([ROWS, NUMBERS], tl.float32)
        # The rows of each block are summed from zero, and the sums are added in the order of the
        # blocks, those of blocks without a row as well. Each row is read once.
        block = 0
        while block < blocks:
            base = tl.load(addresses + first_block + block)
            first_row = block * rows_per_block
            end_row = tl.minimum(rows_per_block, rows - first_row)
            sums = tl.zeros([ROWS, NUMBERS], tl.float32)
            i = 0
            while i < longest:
                position = begin + i
                is_id = position < end
                each = tl.load(ids + position, mask=is_id, other=0).to(tl.int64)
                is_bad = is_id & ((each < 0) | (each >= rows))
                bad_in_bag = tl.minimum(bad_in_bag, tl.where(is_bad, position, NOWHERE))
                row = each - first_row
                here = is_id & (row >= 0) & (row < end_row)
                read = read_words(base, row, here, words, WORDS, ALIGNMENT)
                if WEIGHTED:
                    weight = tl.load(weights + position, mask=here, other=0.0)
                    added = add_rows(sums, read, weight, BITS, True)
                else:
                    added = add_rows(sums, read, 0.0, BITS, False)
                # To add zeros could change bits.
                sums = tl.where(here[:, None], added, sums)
                i += 1
            total = tl.where(block == 0, sums, total + sums)
            block += 1
        # An inverse that is rounded once, which `/` does not do.
        ids_of_bag = tl.maximum((end - begin).to(tl.float32), 1.0)
        inverse = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), ids_of_bag)
        is_mean = means & (end > begin)
        total = tl.where(is_mean[:, None], total * inverse[:, None], total)
        total = tl.where((bad_in_bag < NOWHERE)[:, None], float("nan"), total)
        store_numbers(out + bag * (out_stride * STORED) + out_column, total, columns, there, BITS)
        first_bad = tl.min(bad_in_bag, axis=0)
        bad_key = tl.where(first_bad < bad_position, key, bad_key)
        bad_position = tl.minimum(first_bad, bad_position)
        tile += tl.num_programs(0)
    tell(report, ids, size, bad_key, bad_position)


def sum_bags(
    strips: Strips,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    report: torch.Tensor,
) -> None:
    """Writes the pooled rows of all bags, on the current stream of the device that all tensors are
    on. The host waits for nothing.

    A bad id reads nothing, and the columns of its bag are NaN. So are those of a bag that does not
    lie among the ids.

    Args:
        strips: strips of all features.
        ids: ids key by key, int32 or int64 [ids].
        offsets: places of the bags among the ids, those of a key one after the other, int32 or
            int64 [keys x samples + 1].
        weights: weight of each id, float32 [ids]; None: sums are not weighted.
        out: output, float32 or float16 [samples, columns]. Columns of no strip stay as they are.
        report: report of bad ids, int64 [programs, 3]; see `first_bad_id`. Its length is the number
            of programs, each of which takes a part of an SM.
    """
    assert out.stride(1) == 1 and ids.is_contiguous() and offsets.is_contiguous()
    tile = tile_of(strips, out)
    _sum_bags[(len(report),)](
        ids,
        offsets,
        weights,
        strips.facts,
        strips.addresses,
        out,
        report,
        len(ids),
        len(out),
        strips.count,
        out.stride(0) // tile["STORED"],
        **tile,
        WEIGHTED=weights is not None,
    )

"""The rows of all ids one after the other, with the bits of csrc/lookup/direct/direct_rows.cpp and
of FBGEMM's CPU kernels."""

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


@triton.jit(do_not_specialize=["size", "out_rows", "count"])
def _write_rows(
    ids,
    begins,
    out_begins,
    strips,
    addresses,
    out,
    report,
    size,
    out_rows,
    count,
    out_stride,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    STORED: tl.constexpr,
    COPIED: tl.constexpr,
):
    programs = tl.num_programs(0)
    bad_key = tl.full([], -1, tl.int64)
    bad_position = tl.full([], NOWHERE, tl.int64)
    size = size.to(tl.int64)
    # The host does not know how many tiles a strip has. Its first one is the turn of the program
    # behind that of the last one before.
    turn = tl.program_id(0).to(tl.int64)
    number = 0
    while number < count:
        strip = strips + number * STRIP
        key = tl.load(strip)
        out_column = tl.multiple_of(tl.load(strip + 1), STORED)
        columns = tl.multiple_of(tl.load(strip + 2), STORED)
        words = tl.multiple_of(tl.load(strip + 3), ALIGNMENT // 4)
        rows = tl.load(strip + 4)
        rows_per_block = tl.load(strip + 5)
        first_block = tl.load(strip + 8)
        begin = tl.load(begins + key)
        end = tl.load(begins + key + 1)
        out_row = tl.load(out_begins + number)
        is_outside = (begin < 0) | (begin > end) | (end > size)
        is_outside = is_outside | (out_row < 0) | (out_row + end - begin > out_rows)
        bad_key = tl.where(is_outside & (size < bad_position), key, bad_key)
        bad_position = tl.where(is_outside, tl.minimum(size, bad_position), bad_position)
        end = tl.where(is_outside, begin, end)
        tiles = (end - begin + ROWS - 1) // ROWS
        tile = turn
        while tile < tiles:
            place = tile * ROWS + tl.arange(0, ROWS)
            there = begin + place < end
            each = tl.load(ids + begin + place, mask=there, other=0).to(tl.int64)
            is_bad = there & ((each < 0) | (each >= rows))
            here = there & ((each >= 0) & (each < rows))
            block = tl.where(here, each, 0) // rows_per_block
            base = tl.load(addresses + first_block + block, mask=here, other=0)
            row = each - block * rows_per_block
            read = read_words(base, row, here, words, WORDS, ALIGNMENT)
            to = out + (out_row + place) * (out_stride * STORED) + out_column
            if COPIED:
                # These words are NaN in all types of floats.
                copied = tl.where(is_bad[:, None], -1, read)
                store_numbers(to, copied, columns, there, BITS)
            else:
                zeros = tl.zeros([ROWS, WORDS * (32 // BITS)], tl.float32)
                numbers = add_rows(zeros, read, 0.0, BITS, False)
                numbers = tl.where(is_bad[:, None], float("nan"), numbers)
                store_numbers(to, numbers, columns, there, BITS)
            first_bad = tl.min(tl.where(is_bad, begin + place, NOWHERE), axis=0)
            bad_key = tl.where(first_bad < bad_position, key, bad_key)
            bad_position = tl.minimum(first_bad, bad_position)
            tile += programs
        turn = tile - tiles
        number += 1
    tell(report, ids, size, bad_key, bad_position)


def copy_rows(
    strips: Strips,
    ids: torch.Tensor,
    begins: torch.Tensor,
    out_begins: torch.Tensor,
    out: torch.Tensor,
    report: torch.Tensor,
) -> None:
    """Copies the rows of all ids as they are stored, on the current stream of the device that all
    tensors are on. The host waits for nothing.

    A bad id reads nothing, and its row is NaN. The rows of a key stay as they are if its ids do not
    lie among those of the batch, or its rows not in the output.

    Args:
        strips: strips of all features, of 32 bits. Their columns are words of 4 bytes.
        ids: ids key by key, int32 or int64 [ids].
        begins: places where the ids of each key begin, and their end, int64 [keys + 1].
        out_begins: row of the output where each strip begins, int64 [strips].
        out: output, int32 [rows, words].
        report: see `sum_bags`.
    """
    assert strips.bits == 32 and out.dtype == torch.int32
    _launch(strips, ids, begins, out_begins, out, report, True)


def decode_rows(
    strips: Strips,
    ids: torch.Tensor,
    begins: torch.Tensor,
    out_begins: torch.Tensor,
    out: torch.Tensor,
    report: torch.Tensor,
) -> None:
    """Writes the numbers of the rows of all ids, as bags of one id each; see `copy_rows`.

    Args:
        strips: strips of all features.
        ids: see `copy_rows`.
        begins: see `copy_rows`.
        out_begins: see `copy_rows`.
        out: output, float32 or float16 [rows, columns].
        report: see `sum_bags`.
    """
    _launch(strips, ids, begins, out_begins, out, report, False)


def _launch(
    strips: Strips,
    ids: torch.Tensor,
    begins: torch.Tensor,
    out_begins: torch.Tensor,
    out: torch.Tensor,
    report: torch.Tensor,
    copied: bool,
) -> None:
    assert out.stride(1) == 1 and ids.is_contiguous()
    tile = tile_of(strips, out)
    _write_rows[(len(report),)](
        ids,
        begins,
        out_begins,
        strips.facts,
        strips.addresses,
        out,
        report,
        len(ids),
        len(out),
        strips.count,
        out.stride(0) // tile["STORED"],
        **tile,
        COPIED=copied,
    )

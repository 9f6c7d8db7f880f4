"""A gather of rows by few blocks, in Triton."""

import torch
import triton
import triton.language as tl

# Of one block at once, 32 KiB: eight blocks ask for more than PCIe has under way.
_WORDS_AT_ONCE = 4096


@triton.jit
def _gather(table, ids, out, count, WORDS: tl.constexpr, ROWS: tl.constexpr):
    column = tl.arange(0, WORDS)[None, :]
    tile = tl.program_id(0)
    # No range: Triton 3.6 interprets it with NumPy before 2.4 alone.
    while tile * ROWS < count:
        place = tile * ROWS + tl.arange(0, ROWS)
        there = place < count
        row = tl.load(ids + place, mask=there, other=0)[:, None]
        words = tl.load(table + row * WORDS + column, mask=there[:, None])
        tl.store(out + place[:, None].to(tl.int64) * WORDS + column, words, mask=there[:, None])
        tile += tl.num_programs(0)


def gather(rows: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, blocks: int) -> None:
    """Copies `rows[ids]` to `out`, int64, with so many blocks. Rows have a power of two words."""
    words = rows.shape[1]
    height = _WORDS_AT_ONCE // words
    _gather[(blocks,)](rows, ids, out, len(ids), WORDS=words, ROWS=height, num_warps=8)

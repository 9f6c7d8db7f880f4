"""What kernels know of tables: strips of columns, and the addresses of their rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: Numbers that kernels have of a strip: its attributes in their order, rows in words, and for its
#: addresses their number and the place of the first one.
FIELDS = 9
#: Bytes of the words that kernels read rows in.
WORD_BYTES = 4
# Most bytes that one thread reads or writes at once.
_LOAD_BYTES = 16
_BITS = (32, 16, 8, 4, 2)


@dataclass(frozen=True)
class Strip:
    """Some columns of the table that a feature is looked up in, as TableColumns in csrc.

    Attributes:
        key: place of the feature among the keys of the batches.
        out_column: first column of the output, in its elements.
        columns: number of columns, in elements of the output.
        row_bytes: bytes from row to row.
        rows: number of rows of the table.
        rows_per_block: number of rows of each block but the last ones.
        means: whether bags are pooled to means, not sums. Only of a table in one block, as
            sum_rows_directly has it.
        blocks: address of the first row of each block.
    """

    key: int
    out_column: int
    columns: int
    row_bytes: int
    rows: int
    rows_per_block: int
    means: bool
    blocks: Sequence[int]


class Strips:
    """The strips of a lookup in the memory of a device, in the order of the output.

    So programs that read strip by strip are all in one table at a time, which is up to 2.5 times as
    fast as all tables at once (docs/design/gpu-reads.md).

    Args:
        strips: the strips.
        bits: bits of a number of a row: 32 and 16 of floats; 8, 4 and 2 of rows that begin with
            scale and shift, two fp16 numbers, as FBGEMM stores them.
        device: device of the kernels.

    Attributes:
        count: number of the strips.
        bits: see above.
        words: words of the longest row.
        alignment: bytes of which the address of each row is a multiple: 16, 8 or 4.
        out_alignment: columns of which the places and widths of all strips are multiples: 4, 2
            or 1.
        facts: facts of each strip, int64 [strips, FIELDS].
        addresses: address of each block, int64 [blocks]. Kernels read them at each launch.

    Raises:
        ValueError: a row is not of whole words, or has fewer than its columns need.
    """

    def __init__(self, strips: Sequence[Strip], bits: int, device: torch.device) -> None:
        assert bits in _BITS
        header = WORD_BYTES if bits <= 8 else 0
        facts: list[list[int]] = []
        addresses: list[int] = []
        for strip in strips:
            needed = header + -(-strip.columns * bits // 8)
            if strip.row_bytes % WORD_BYTES or strip.row_bytes < needed:
                raise ValueError(
                    f"rows of {strip.columns} columns of {bits} bits take {strip.row_bytes} bytes, "
                    f"but GPUs read whole words of {WORD_BYTES} bytes, and at least {needed} bytes"
                )
            facts.append(
                [
                    strip.key,
                    strip.out_column,
                    strip.columns,
                    strip.row_bytes // WORD_BYTES,
                    strip.rows,
                    strip.rows_per_block,
                    strip.means and len(strip.blocks) == 1,
                    len(strip.blocks),
                    len(addresses),
                ]
            )
            addresses += strip.blocks
        self.count = len(strips)
        self.bits = bits
        self.words = max((strip.row_bytes // WORD_BYTES for strip in strips), default=1)
        lengths = (strip.row_bytes for strip in strips)
        self.alignment = math.gcd(_LOAD_BYTES, *lengths, *addresses)
        if self.alignment % WORD_BYTES:
            raise ValueError(f"a table begins at no multiple of {WORD_BYTES} bytes: {addresses}")
        places = (each for strip in strips for each in (strip.out_column, strip.columns))
        self.out_alignment = math.gcd(_LOAD_BYTES // WORD_BYTES, *places)
        self.facts = torch.tensor(facts, dtype=torch.int64, device=device).view(self.count, FIELDS)
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)

    def move_to(self, blocks: Sequence[int]) -> None:
        """Makes later launches on the current stream read other memory, those of CUDA graphs that
        were captured before as well.

        Args:
            blocks: address of each block, those of a strip one after the other.

        Raises:
            ValueError: there are more or fewer blocks, or one is less aligned.
        """
        if len(blocks) != len(self.addresses) or any(at % self.alignment for at in blocks):
            raise ValueError(
                f"{len(blocks)} blocks in place of {len(self.addresses)}, or one that does not "
                f"begin at a multiple of {self.alignment} bytes"
            )
        # From pageable memory the host would wait.
        new = torch.tensor(blocks, dtype=torch.int64, pin_memory=self.addresses.is_cuda)
        self.addresses.copy_(new, non_blocking=True)

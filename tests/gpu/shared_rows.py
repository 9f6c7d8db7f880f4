"""Tables in sealed shared memory, as ranks have them, and batches of ids for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torchrec_bls import _native
from torchrec_bls.direct.gpu.strips import Strip

# To the end of the process: strips have no more than addresses.
_segments: list[_native.TableSegment] = []


class Memory:
    """Parts of tables one after the other in a sealed segment, mapped as lookups have it.

    Attributes:
        window: its mapping.
        address: address of the first byte.
    """

    def __init__(self, parts: list[torch.Tensor], gap: int) -> None:
        """Leaves `gap` bytes between parts."""
        first: int = _native.FIRST_TABLE_OFFSET
        at = first
        self._places = []
        placed = []
        for part in parts:
            self._places.append(at - first)
            if part.numel():
                placed.append((part, at))
            at += part.numel() * part.itemsize + gap
        segment = _native.TableSegment.create((0, "1", bytes(32)), placed, at, False)
        _segments.append(segment)
        self.window = _native.TableWindow([(segment, first, -(-(at - first) // 4096) * 4096)])
        self.address = self.window.address

    def offset(self, part: int) -> int:
        """The place of a part in the window, in bytes."""
        return self._places[part]


@dataclass
class CutTable:
    """A table in blocks of rows and pieces of columns.

    Attributes:
        weights: [rows, columns].
        widths: columns of each piece.
        blocks: number of blocks of each piece.
    """

    weights: torch.Tensor
    widths: list[int]
    blocks: int

    @property
    def rows_per_block(self) -> int:
        return -(-len(self.weights) // self.blocks)

    def parts(self) -> list[torch.Tensor]:
        """The blocks of the first piece, of the second one, and so on."""
        return [
            block.contiguous()
            for piece in self.weights.split(self.widths, 1)
            for block in self._cut(piece)
        ]

    def _cut(self, piece: torch.Tensor) -> list[torch.Tensor]:
        length = self.rows_per_block
        return [piece[number * length : (number + 1) * length] for number in range(self.blocks)]


@dataclass
class Looked:
    """A feature: its key, its table, and whether bags are means."""

    key: int
    table: int
    means: bool = False


class Lookup:
    """Features in the form of native code and as strips of a kernel.

    Attributes:
        features: for native code.
        strips: for kernels.
        columns: number of columns of the output, in elements.
    """

    def __init__(
        self,
        tables: list[CutTable],
        looked: list[Looked],
        gap: int,
        element_bytes: int,
        pooled: bool,
    ) -> None:
        """An element of the output is of `element_bytes`, float32 or words of stored rows."""
        memory = Memory([part for table in tables for part in table.parts()], gap)
        first_parts = [0]
        for table in tables:
            first_parts.append(first_parts[-1] + len(table.widths) * table.blocks)
        native: list[Any] = []
        self.strips: list[Strip] = []
        out_byte = 0
        for each in looked:
            table = tables[each.table]
            item, rows = table.weights.itemsize, len(table.weights)
            part, column_byte, pieces = first_parts[each.table], 0, []
            for width in table.widths:
                places = [memory.offset(part + number) for number in range(table.blocks)]
                lengths = [len(block) for block in table._cut(table.weights)]
                row_bytes = width * item
                blocks = list(zip(range(table.blocks), places, lengths, strict=True))
                pieces.append((column_byte, row_bytes, table.rows_per_block, blocks))
                self.strips.append(
                    Strip(
                        each.key,
                        (column_byte + (out_byte if pooled else 0)) // element_bytes,
                        row_bytes // element_bytes,
                        row_bytes,
                        rows,
                        table.rows_per_block,
                        each.means,
                        [memory.address + place for place in places],
                    )
                )
                part += table.blocks
                column_byte += row_bytes
            native.append((each.key, out_byte, each.means, pieces))
            out_byte += column_byte
        self.columns = out_byte // element_bytes
        self.features = _native.ShardedFeatures(native, memory.window)


@dataclass
class Batch:
    """Ids key by key.

    Attributes:
        samples: number of samples.
        lengths: number of ids of each bag, int32 [keys x samples].
        ids: the ids, [ids].
        weights: their weights, float32 [ids], if they have some.
        counts: number of ids of each key.
    """

    samples: int
    lengths: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None
    counts: list[int]

    @classmethod
    def random(
        cls,
        generator: torch.Generator,
        rows: list[int],
        samples: int,
        longest: int,
        weighted: bool,
        dtype: torch.dtype,
    ) -> Batch:
        """Ids below `rows` of each key."""
        lengths = torch.randint(
            longest + 1, (len(rows), samples), generator=generator, dtype=torch.int32
        )
        counts = lengths.sum(1).tolist()
        ids = [
            torch.randint(end, (count,), generator=generator, dtype=dtype)
            for end, count in zip(rows, counts, strict=True)
        ]
        all_ids = torch.cat(ids) if ids else torch.empty(0, dtype=dtype)
        weights = numbers(generator, len(all_ids)) if weighted else None
        return cls(samples, lengths.view(-1), all_ids, weights, counts)

    @property
    def offsets(self) -> torch.Tensor:
        """Where bags begin, int64 [keys x samples + 1]."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])

    @property
    def begins(self) -> torch.Tensor:
        """Where keys begin, int64 [keys + 1]."""
        return torch.tensor([0, *self.counts]).cumsum(0)


def numbers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Floats of all sizes, some of them -0.0 or so small that their products vanish."""
    found = torch.randn(shape, generator=generator)
    kind = torch.randint(12, shape, generator=generator)
    found[kind == 0] = -0.0
    found[kind == 1] *= 1e-30
    found[kind == 2] *= -1e-42
    found[kind == 3] *= 1e6
    return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same bits; NaN are all alike."""
    words = {2: torch.int16, 4: torch.int32}[one.itemsize]
    differ = one.view(words) != other.view(words)
    if one.is_floating_point():
        differ &= ~(one.isnan() & other.isnan())
    return one.shape == other.shape and one.dtype == other.dtype and not bool(differ.any())

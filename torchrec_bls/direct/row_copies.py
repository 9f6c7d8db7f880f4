"""The two copies of tables that are refreshed by row, as their owner writes to them.

docs/design/row-refresh.md says why nobody reads a row while it is written.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from torchrec_bls import _native
from torchrec_bls.direct.beside_lookups import leave_core, one_torch_thread
from torchrec_bls.direct.owner_part import HeldPiece, OwnerPart
from torchrec_bls.direct.part_index import Address, Label, Side, bytes_of
from torchrec_bls.direct.row_deltas import RowDelta, RowDeltas
from torchrec_bls.direct.shared_tables import RowBlock, SharedTables
from torchrec_bls.lifetime import whole_at_forks

#: The one owner of all tables.
OWNER = 0


@dataclass
class _Pair:
    """The two copies.

    Attributes:
        pieces: pieces that have copies by number, with the one on each side. All other pieces are
            the same on both sides.
        differ: by table, the rows in which the side that does not serve differs from the one that
            serves: those of the delta that serves, int64. All pieces of these tables have copies.
        tried: by table, the rows that attempts to write the next version may have written, int64.
        sources: pieces that serve themselves as yet, of which copies were made, by number.
    """

    pieces: dict[int, tuple[HeldPiece, HeldPiece]] = field(default_factory=dict)
    differ: dict[str, torch.Tensor] = field(default_factory=dict)
    tried: dict[str, torch.Tensor] = field(default_factory=dict)
    sources: dict[int, HeldPiece] = field(default_factory=dict)


class RowCopies:
    """The pieces of a module's tables that got rows, on both sides. The thread that publishes has
    it alone.

    It does not know which side serves: the version that serves says it. What an attempt leaves that
    has failed is a side without a version, and rows that count as different.

    Args:
        tables: tables of the module, all of one owner.
    """

    def __init__(self, tables: SharedTables) -> None:
        self._tables = tables
        self._cut = tables.cuts[OWNER]
        self._pair = _Pair()

    def forget(self) -> None:
        """Gives the copies up, since a version comes that has none of them. The next delta makes
        new ones."""
        self._pair = _Pair()

    @whole_at_forks()
    def prepare(self, serving: OwnerPart, version: str, deltas: RowDeltas) -> int:
        """Makes the copies that a delta needs and that are not there, with the rows that serve.

        Args:
            serving: the part that serves.
            version: version that is made.
            deltas: new rows.

        Returns:
            The bytes of the new copies.

        Raises:
            RendezvousError: there is no memory for them.
        """
        if not self._are_copies_of(serving):
            self.forget()
        pair, made = self._pair, 0
        for block in self._blocks(deltas):
            for number, _, _ in self._cut.within(block.begin, block.end):
                if number not in pair.pieces:
                    source = pair.sources[number] = serving.pieces[number]
                    copy = partial(self._copy, number, source, version)
                    pair.pieces[number] = copy(), copy()
                    made += 2 * self._cut.pieces[number].size
        return made

    @one_torch_thread()
    def write(self, side: Side, serving: OwnerPart, deltas: RowDeltas) -> None:
        """Writes a version to the side that does not serve, which nobody reads.

        Args:
            side: that side.
            serving: the part that serves.
            deltas: new rows.
        """
        tried = self._pair.tried
        stale = [*self._pair.differ.items(), *tried.items()]
        # Before the first byte: whatever ends this, the next attempt writes these rows again.
        for table, (ids, _) in deltas.items():
            tried[table] = torch.unique(torch.cat([tried[table], ids])) if table in tried else ids
        served, written = serving.pieces, self.pieces(side, serving)
        for table, ids in stale:
            for block in self._blocks([table]):
                rows = ids[_are_in(ids, block)] - block.first_row
                sources, places = self._places(served, block), self._places(written, block)
                _native.copy_rows(sources, places, block.row_bytes, rows)
                leave_core()
        # After those, of which some may be the same.
        for table, delta in deltas.items():
            for block in self._blocks([table]):
                _native.write_rows(self._places(written, block), *_in_block(delta, block))
                leave_core()

    def pieces(self, side: Side, serving: OwnerPart) -> list[HeldPiece]:
        """Returns the pieces of a side by number.

        Args:
            side: the side.
            serving: the part that serves.
        """
        copied = self._pair.pieces
        return [
            copied[number][side] if number in copied else piece
            for number, piece in enumerate(serving.pieces)
        ]

    def others(self, side: Side) -> dict[int, Address]:
        """Returns the addresses of the copies that are not on a side, by number."""
        other = 1 - side
        return {number: each[other].segment.address for number, each in self._pair.pieces.items()}

    def announced(self, deltas: RowDeltas) -> None:
        """Notes that a delta serves. The other side lacks its rows, and no others."""
        differ = {table: delta.ids for table, delta in deltas.items()}
        self._pair = _Pair(self._pair.pieces, differ)

    def _are_copies_of(self, serving: OwnerPart) -> bool:
        """Returns whether what serves has the copies on its side, or still what they were made
        from."""
        pair = self._pair
        for number, copies in pair.pieces.items():
            may_serve = [] if serving.side is None else [copies[serving.side]]
            if number in pair.sources:
                may_serve.append(pair.sources[number])
            if _file_of(serving.pieces[number]) not in map(_file_of, may_serve):
                return False
        return True

    def _copy(self, number: int, source: HeldPiece, version: str) -> HeldPiece:
        piece = self._cut.pieces[number]
        rows = bytes_of(source.segment)[piece.offset : piece.segment_bytes]
        segment = _native.TableSegment.create(
            Label(OWNER, version, self._tables.digest).of_piece(piece, version),
            [(rows, piece.offset)],
            piece.segment_bytes,
            self._tables.huge_pages,
            piece.offset,
            refreshed=True,
        )
        return HeldPiece(segment, version, ())

    def _places(
        self, pieces: Sequence[HeldPiece], block: RowBlock
    ) -> list[tuple[_native.TableSegment, int, int]]:
        """Returns where the rows of a block lie, as the native functions take it."""
        return [
            (pieces[number].segment, offset, size)
            for number, offset, size in self._cut.within(block.begin, block.end)
        ]

    def _blocks(self, tables: Iterable[str]) -> Iterator[RowBlock]:
        for table in tables:
            yield from self._tables.row_blocks(table)


def _file_of(piece: HeldPiece) -> tuple[int, int]:
    *_, device, inode, _ = piece.segment.address
    return device, inode


def _are_in(ids: torch.Tensor, block: RowBlock) -> torch.Tensor:
    return (ids >= block.first_row) & (ids < block.first_row + block.rows)


def _in_block(delta: RowDelta, block: RowBlock) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows of a block in a delta, counted from its first one, and what is stored."""
    ends = torch.tensor([block.first_row, block.first_row + block.rows])
    here = slice(*torch.searchsorted(delta.ids, ends).tolist())
    columns = slice(block.first_byte, block.first_byte + block.row_bytes)
    return delta.ids[here] - block.first_row, delta.stored[here, columns].contiguous()

"""An owner's part of a version: a sealed index, and the sealed pieces that it lists."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from torchrec_bls import _native
from torchrec_bls.direct.dense_weights import dense_weights
from torchrec_bls.direct.part_index import (
    CURE,
    Address,
    Facts,
    IndexRecord,
    Label,
    PieceRecord,
    Side,
    bytes_of,
    digests_in,
    digests_told,
    make_index,
    other_side,
    read_index,
)
from torchrec_bls.direct.pieces import Cut, Piece
from torchrec_bls.direct.steps import Content, Step
from torchrec_bls.errors import ProtocolError
from torchrec_bls.huge_pages import HugePages


class HeldPiece(NamedTuple):
    """A piece in this process.

    Attributes:
        segment: its segment.
        version: version that made it.
        digests: digests of its steps; one is empty if it is not known. A piece that is refreshed
            has none.
    """

    segment: _native.TableSegment
    version: str
    digests: Sequence[bytes]

    def has(self, number: int, digest: bytes) -> bool:
        """Returns whether a step has the bytes that belong to a digest."""
        return number < len(self.digests) and bool(digest) and self.digests[number] == digest


@dataclass(frozen=True)
class OwnerPart:
    """An owner's part of a version of a module's tables. Whoever has it has all of it mapped.

    Attributes:
        label: its label.
        index: its index.
        index_end: place after the index, where dense weights may follow.
        pieces: its pieces by number.
        facts: facts of its publication.
        drained_for: see IndexRecord.
        side: see IndexRecord.
        others: addresses of the copies on the other side, by the numbers of their pieces.
    """

    label: Label
    index: _native.TableSegment
    index_end: int
    pieces: tuple[HeldPiece, ...]
    facts: Facts
    drained_for: str = ""
    side: Side | None = None
    others: Mapping[int, Address] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        label: Label,
        cut: Cut,
        content: Content,
        dense: Mapping[str, Any] | None,
        before: Mapping[int, HeldPiece],
        huge_pages: HugePages,
        trained: float | None = None,
    ) -> "OwnerPart":
        """Makes an owner's part of a version. Other processes do not know it yet.

        Args:
            label: its label.
            cut: pieces of the owner's bytes.
            content: content of the owner's bytes. A step is asked for once.
            dense: weights of the version that are published with the tables, by name.
            before: pieces of another version by number, which stay if they have the same content.
            huge_pages: what its pieces ask for, see huge_pages_for.
            trained: see Facts.

        Raises:
            RendezvousError: there is no memory for it.
            ValueError: the content is not possible, or dense weights can't be handed over.
        """
        begin = time.monotonic()
        held: list[HeldPiece] = []
        written = reused = 0
        for piece in cut.pieces:
            old = before.get(piece.number)
            made = _made(label, piece, content, old, huge_pages)
            held.append(made)
            if made is old:
                reused += piece.size
            else:
                written += piece.size
        facts = Facts(time.time(), time.monotonic() - begin, written, reused, trained)
        return cls.of_pieces(label, held, facts, dense)

    @classmethod
    def of_pieces(
        cls,
        label: Label,
        pieces: Sequence[HeldPiece],
        facts: Facts,
        dense: Mapping[str, Any] | None,
        side: Side | None = None,
        others: Mapping[int, Address] = MappingProxyType({}),
    ) -> "OwnerPart":
        """Makes the part that consists of some pieces.

        Args:
            label: its label.
            pieces: its pieces by number.
            facts: facts of its publication.
            dense: weights of the version that are published with the tables, by name.
            side: side of the version, see IndexRecord.
            others: addresses of the copies on the other side, by the numbers of their pieces.

        Raises:
            RendezvousError: there is no memory for its index.
            ValueError: dense weights can't be handed over.
        """
        listed = [
            PieceRecord(
                each.segment.address, each.version, digests_told(each.digests), others.get(number)
            )
            for number, each in enumerate(pieces)
        ]
        index, end = make_index(label, IndexRecord(listed, facts, side=side), dense)
        return cls(label, index, end, tuple(pieces), facts, side=side, others=others)

    @classmethod
    def drained(cls, label: Label, version: str) -> "OwnerPart":
        """Makes the part of a version without rows. It takes no more memory than its index.

        Args:
            label: its label.
            version: version for whose making the tables are drained.

        Raises:
            RendezvousError: there is no memory for it.
        """
        facts = Facts(time.time(), 0.0, 0, 0)
        index, end = make_index(label, IndexRecord([], facts, version), None)
        return cls(label, index, end, (), facts, version)

    @classmethod
    def of(
        cls,
        label: Label,
        index: _native.TableSegment,
        cut: Cut,
        open_all: Callable[[Sequence[Address], Sequence[Label]], Iterable[_native.TableSegment]],
    ) -> "OwnerPart":
        """Returns the part that an index lists.

        Args:
            label: label of the index.
            index: the index.
            cut: pieces of the owner's bytes.
            open_all: function that maps the pieces at some addresses, which have some labels.

        Raises:
            BLSError: the index is none of these tables; or a piece is not there any more, or is
                another one.
        """
        record, end = read_index(index, label)
        pieces = () if record.drained_for else cut.pieces
        if len(record.pieces) != len(pieces):
            raise ProtocolError(
                f"the tables of rank {label.owner} have {len(pieces)} pieces, but what was "
                f"announced has {len(record.pieces)}: {CURE}"
            )
        addresses = [each.address for each in record.pieces]
        labels = [
            label.of_piece(piece, each.version)
            for piece, each in zip(pieces, record.pieces, strict=True)
        ]
        held = []
        for piece, each, segment in zip(
            pieces, record.pieces, open_all(addresses, labels), strict=True
        ):
            if segment.size != piece.segment_bytes:
                raise ProtocolError(
                    f"piece {piece.number} of the tables of rank {label.owner} takes "
                    f"{piece.segment_bytes} bytes, but what was announced has {segment.size}: "
                    f"{CURE}"
                )
            if segment.is_refreshed and record.side is None:
                raise ProtocolError(
                    f"piece {piece.number} of the tables of rank {label.owner} may be written to, "
                    f"but what was announced stays as it is: {CURE}"
                )
            held.append(HeldPiece(segment, each.version, digests_in(each.digests)))
        others = {
            number: each.other
            for number, each in enumerate(record.pieces)
            if each.other is not None
        }
        part = cls(
            label, index, end, tuple(held), record.facts, record.drained_for, record.side, others
        )
        part.dense_weights()
        return part

    def on_other_side(
        self,
        cut: Cut,
        open_all: Callable[[Sequence[Address], Sequence[Label]], Iterable[_native.TableSegment]],
    ) -> "OwnerPart":
        """Returns a part of the copies on the other side, on which there may be no version.

        Args:
            cut: pieces of the owner's bytes.
            open_all: see `of`.

        Raises:
            BLSError: a piece is not there any more, or is another one.
        """
        labels = [
            self.label.of_piece(cut.pieces[number], self.pieces[number].version)
            for number in self.others
        ]
        pieces = list(self.pieces)
        opened = open_all(list(self.others.values()), labels)
        for number, segment in zip(self.others, opened, strict=True):
            pieces[number] = pieces[number]._replace(segment=segment)
        return replace(self, pieces=tuple(pieces), side=other_side(self.side))

    def dense_weights(self) -> dict[str, Any] | None:
        """Returns the dense weights that were published with the tables, or None.

        Raises:
            ProtocolError: the bytes after the index are something else.
        """
        try:
            return dense_weights(self.index, self.index_end)
        except ValueError as error:
            raise ProtocolError(
                f"the index of the tables of rank {self.label.owner} ends at byte "
                f"{self.index_end} of {self.index.size}, and no dense weights follow ({error}): "
                f"{CURE}"
            ) from error

    @property
    def numbered(self) -> dict[int, HeldPiece]:
        """Returns the pieces that stay as they are, by number."""
        return {
            number: each for number, each in enumerate(self.pieces) if not each.segment.is_refreshed
        }

    def staying(self, cut: Cut, content: Content) -> dict[int, HeldPiece]:
        """Reads a content, and returns the pieces that have it already, by number.

        Args:
            cut: pieces of the owner's bytes.
            content: content of the owner's bytes.

        Raises:
            ValueError: the content is not possible.
        """
        stay = {}
        for piece in cut.pieces:
            old = self.pieces[piece.number]
            steps = (step for span in piece.spans for step in content(span.begin, span.end))
            is_same = not old.segment.is_refreshed
            # All of it is read, whatever the first step says: what can't be read is an error.
            for number, step in enumerate(steps):
                if not old.has(number, step.digest):
                    step.check()
                    is_same = False
            if is_same:
                stay[piece.number] = old
        return stay

    @property
    def descriptors(self) -> list[int]:
        """Returns the descriptors of the index and of the pieces by number."""
        return [self.index.descriptor, *(each.segment.descriptor for each in self.pieces)]

    def within(
        self, cut: Cut, begin: int, end: int
    ) -> Iterator[tuple[_native.TableSegment, int, int]]:
        """Yields some of the owner's pages for a window, in their order."""
        for number, offset, count in cut.within(begin, end):
            yield self.pieces[number].segment, offset, count


def check_is_file(descriptor: int, address: Address, where: str) -> None:
    """Raises ProtocolError if a descriptor that was handed over is of another file than announced.

    Args:
        descriptor: the descriptor.
        address: address of the file.
        where: place that it came from, for messages.
    """
    found, (_, _, device, inode, _) = os.fstat(descriptor), address
    if (found.st_dev, found.st_ino) != (device, inode):
        raise ProtocolError(f"{where} hands over another piece than its index lists: {CURE}")


def _made(
    label: Label, piece: Piece, content: Content, old: HeldPiece | None, huge_pages: HugePages
) -> HeldPiece:
    """Returns a piece with some content: the old one if that has the same."""
    digests: list[bytes] = []

    def steps() -> Iterator[tuple[Step, int]]:
        for span in piece.spans:
            for step in content(span.begin, span.end):
                digests.append(step.digest)
                yield step, span.offset + step.place - span.begin

    def is_old() -> bool:
        return old is not None and old.has(len(digests) - 1, digests[-1])

    in_order = steps()
    different = next((each for each in in_order if not is_old()), None)
    if different is None and old is not None:
        return old
    has_old_steps = len(digests) > 1

    def parts() -> Iterator[tuple[torch.Tensor, int]]:
        if different is None:
            return
        pages = None if old is None else bytes_of(old.segment)
        if pages is not None and has_old_steps:
            first, (_, end) = piece.offset, different
            yield pages[first:end], first
        for step, offset in chain([different], in_order):
            if pages is not None and is_old():
                yield pages[offset : offset + step.size], offset
            else:
                yield step.stored(), offset

    made = label.of_piece(piece, label.version)
    segment = _native.TableSegment.create(
        made, parts(), piece.segment_bytes, huge_pages, piece.offset
    )
    return HeldPiece(segment, label.version, tuple(digests))

"""The pieces that an owner's bytes are cut into, so that a version rewrites only what changed."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise

from torchrec_bls import _native
from torchrec_bls.huge_pages import HugePages

_SMALL_PAGE, _HUGE_PAGE = 4096, 2 << 20
# Part of an owner's bytes that is worth a piece. As each piece takes a descriptor in each process,
# there are two times as many, and two more, at most.
_WORTH = 32
# Of a group with at least two times as many bytes each piece has at least so many.
_LARGE = 1 << 30

#: First and last byte, exclusive.
Range = tuple[int, int]


@dataclass(frozen=True)
class Span:
    """Consecutive pages of an owner's bytes in one piece.

    Attributes:
        begin: place of the first byte among the owner's.
        end: place after the last byte.
        offset: place of the first byte in the segment of the piece.
    """

    begin: int
    end: int
    offset: int


@dataclass(frozen=True)
class Piece:
    """A part of an owner's bytes that has a segment of its own.

    Attributes:
        number: its number among the owner's pieces.
        spans: its pages, in their order.
    """

    number: int
    spans: tuple[Span, ...]

    # Each version of a table asks for the sizes and digests of all its pieces.

    @cached_property
    def size(self) -> int:
        """Returns the number of its bytes."""
        return sum(span.end - span.begin for span in self.spans)

    @property
    def offset(self) -> int:
        """Returns the place of its first byte in its segment. Between it and the label there is no
        memory."""
        return self.spans[0].offset

    @cached_property
    def segment_bytes(self) -> int:
        """Returns the place after its last byte in its segment."""
        return self.offset + self.size

    def digest(self, layout: bytes) -> bytes:
        """Returns 32 bytes that only the same piece of the same layout has.

        Args:
            layout: digest of the layouts.
        """
        return hashlib.sha256(layout + self._told).digest()

    @cached_property
    def _told(self) -> bytes:
        return repr(self).encode()


@dataclass(frozen=True)
class Cut:
    """How an owner's bytes are cut. Each process computes the same.

    Attributes:
        pieces: the pieces by number.
    """

    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, tables: Sequence[Range], size: int, huge_pages: HugePages) -> "Cut":
        """Cuts an owner's bytes, at pages of 4 KiB: pages of 2 MiB would have rows of two groups.
        Only those of the pool are never parted.

        A table that is worth a piece is a group. Consecutive smaller ones are one together, until
        it is worth a piece. Pages with bytes of two groups are one more piece together. So a piece
        has no bytes of tables in another one, except for a few pages.

        Args:
            tables: first and last bytes of the tables' rows, which do not overlap.
            size: number of bytes. All up to the next page are in a piece.
            huge_pages: what the pieces ask for, see huge_pages_for.
        """
        page, aligned = page_bytes(huge_pages == "hugetlb"), page_bytes(huge_pages)
        end = -(-size // aligned) * aligned
        groups = _groups(sorted(tables), max(end // _WORTH, page))
        insides: list[Range] = []
        seams: list[Range] = []
        begin = 0
        for (_, last), (first, _) in pairwise(groups):
            border = -(-last // page) * page
            if border <= first:
                insides.append((begin, border))
                begin = border
                continue
            seam = border - page
            insides.append((begin, seam))
            # A group of less than a page may have no other.
            if not seams or seams[-1][1] < border:
                seams.append((seam, border))
            begin = border
        insides.append((begin, end))
        parts = [part for inside in insides for part in _parts(inside, end // _WORTH, page)]
        # What is a page of 2 MiB in memory is one in the segment.
        spans = [_spans([part], _first_offset(part[0], aligned)) for part in parts]
        if seams:
            spans.append(_spans(seams, _first_offset(seams[0][0], page)))
        return cls(tuple(Piece(number, tuple(each)) for number, each in enumerate(spans)))

    @cached_property
    def size(self) -> int:
        """Returns the number of the owner's bytes, in whole pages."""
        return sum(piece.size for piece in self.pieces)

    def within(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields the pages from `begin` to `end`, in their order: number of the piece, place in its
        segment, and bytes."""
        in_order = self._in_order
        at = bisect_right(in_order, begin, key=lambda each: each[0].end)
        for span, piece in islice(in_order, at, None):
            first, last = max(begin, span.begin), min(end, span.end)
            if first >= last:
                return
            yield piece.number, span.offset + first - span.begin, last - first

    @cached_property
    def _in_order(self) -> list[tuple[Span, Piece]]:
        spans = [(span, piece) for piece in self.pieces for span in piece.spans]
        return sorted(spans, key=lambda each: each[0].begin)


def page_bytes(huge_pages: HugePages) -> int:
    """Returns the size of the pages that are asked for, in bytes."""
    return _HUGE_PAGE if huge_pages else _SMALL_PAGE


def _groups(tables: Sequence[Range], least: int) -> list[Range]:
    """Returns consecutive tables of less than `least` bytes together, as few as have so many."""
    groups: list[Range] = []
    for begin, end in tables:
        if groups and max(end - begin, groups[-1][1] - groups[-1][0]) < least:
            groups[-1] = groups[-1][0], end
        else:
            groups.append((begin, end))
    return groups


def _parts(inside: Range, least: int, page: int) -> Iterator[Range]:
    """Yields the parts of a group, all about as large."""
    begin, end = inside
    pages = (end - begin) // page
    count = max(1, (end - begin) // max(_LARGE, least))
    borders = [begin + pages * number // count * page for number in range(count + 1)]
    yield from ((first, last) for first, last in pairwise(borders) if first < last)


def _first_offset(begin: int, aligned: int) -> int:
    """Returns the first place in a segment, behind the label, that is as far behind a multiple of
    `aligned` as `begin`."""
    first: int = _native.FIRST_TABLE_OFFSET
    return first + (begin - first) % aligned


def _spans(ranges: Sequence[Range], offset: int) -> Iterator[Span]:
    for begin, end in ranges:
        yield Span(begin, end, offset)
        offset += end - begin

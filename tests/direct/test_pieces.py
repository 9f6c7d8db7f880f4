"""How an owner's bytes are cut into pieces, by brute force over their pages."""

import os
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_bls._native import TableSegment, TableWindow
from torchrec_bls.direct.pieces import Cut, Range, page_bytes
from torchrec_bls.huge_pages import HugePages

PAGE = 4096
MOST_PIECES = 66


def spans_in_order(cut: Cut) -> list[Range]:
    return sorted((span.begin, span.end) for piece in cut.pieces for span in piece.spans)


def tables_of(drawn: list[tuple[int, int]]) -> tuple[list[Range], int]:
    """Returns tables with gaps before them, and where the last one ends."""
    tables: list[Range] = []
    at = 0
    for gap, size in drawn:
        tables.append((at + gap, at + gap + size))
        at += gap + size
    return tables, at


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 130),
            st.one_of(
                st.integers(1, 3 * PAGE), st.integers(1, 100 * PAGE), st.integers(1, 8 << 30)
            ),
        ),
        max_size=90,
    ),
    st.sampled_from([False, True, "hugetlb"]),
    st.integers(0, 200),
    st.data(),
)
def test_each_page_is_in_one_piece(
    drawn: list[tuple[int, int]], huge_pages: HugePages, behind: int, data: st.DataObject
) -> None:
    page, aligned = page_bytes(huge_pages == "hugetlb"), page_bytes(huge_pages)
    tables, end = tables_of(drawn)
    size = end + behind
    cut = Cut.of(tables[::-1], size, huge_pages)
    spans = spans_in_order(cut)
    assert cut.size == -(-size // aligned) * aligned
    assert [0, *[end for _, end in spans]] == [*[begin for begin, _ in spans], cut.size]
    assert all(begin % page == 0 and begin < end for begin, end in spans)
    assert len(cut.pieces) <= MOST_PIECES
    for number, piece in enumerate(cut.pieces):
        assert piece.number == number
        # In the segment the label comes first, and then the pages in their order. What is a page of
        # 2 MiB in memory is one there.
        first, *_ = piece.spans
        assert PAGE <= first.offset <= PAGE + aligned and first.offset % page == 0
        if len(piece.spans) == 1 and piece is not cut.pieces[-1]:  # which may be the seams
            assert first.offset % aligned == first.begin % aligned
        offsets = accumulate([first.offset, *[span.end - span.begin for span in piece.spans]])
        assert [*[span.offset for span in piece.spans], piece.segment_bytes] == list(offsets)
    digests = {piece.digest(bytes(32)) for piece in cut.pieces}
    assert len(digests) == len(cut.pieces)
    assert not digests & {piece.digest(bytes([1] * 32)) for piece in cut.pieces}
    pages = cut.size // page
    first = data.draw(st.integers(0, pages)) * page
    last = data.draw(st.integers(first // page, pages)) * page
    found = list(cut.within(first, last))
    at = first
    for number, offset, count in found:
        [span] = [
            span
            for span in cut.pieces[number].spans
            if span.offset <= offset < span.offset + span.end - span.begin
        ]
        assert at == span.begin + offset - span.offset and at + count <= span.end
        at += count
    assert at == last


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(1, 9 * PAGE), st.integers(1, 90 * PAGE)), min_size=1, max_size=40
    )
)
def test_a_table_shares_its_piece_with_small_ones_at_most(sizes: list[int]) -> None:
    """A piece with a page of one table alone has no other table if that one has 1/32 of all bytes,
    and otherwise others of less than 1/16 together. All other pages are of several tables."""
    tables, size = tables_of([(0, size) for size in sizes])
    cut = Cut.of(tables, size, False)
    worth = max(cut.size // 32, PAGE)
    for piece in cut.pieces:
        pages = [
            [table for table in tables if table[0] < begin + PAGE and begin < table[1]]
            for span in piece.spans
            for begin in range(span.begin, span.end, PAGE)
        ]
        alone = {of_page[0] for of_page in pages if len(of_page) == 1}
        if any(end - begin >= worth for begin, end in alone):
            assert len({table for of_page in pages for table in of_page}) == 1
        elif alone:
            assert piece.size < 2 * worth + 2 * PAGE


def test_large_tables_are_cut_and_equal_ones_are_not() -> None:
    equal = Cut.of([(at << 24, (at + 1) << 24) for at in range(26)], 26 << 24, False)
    assert [piece.size for piece in equal.pieces] == [1 << 24] * 26
    large = Cut.of([(0, 5 << 30)], 5 << 30, False)
    assert [piece.size for piece in large.pieces] == [1 << 30] * 5
    # All pieces together are few, however many tables there are.
    borders = [number * 5000 for number in range(1001)]
    assert len(Cut.of(list(pairwise(borders)), 5_000_000, False).pieces) <= MOST_PIECES
    assert Cut.of([], 0, False).pieces == ()


def test_a_segment_has_no_memory_before_its_first_part() -> None:
    first, end = 1 << 20, (1 << 20) + 4 * PAGE
    rows = torch.full((4 * PAGE,), 7, dtype=torch.uint8)
    segment = TableSegment.create((0, "1", bytes(32)), [(rows, first)], end, False, first)
    assert segment.size == end
    assert os.fstat(segment.descriptor).st_blocks * 512 == PAGE + 4 * PAGE
    window = TableWindow([(segment, first, 4 * PAGE)])
    assert torch.equal(torch.frombuffer(window, dtype=torch.uint8), rows)
    with pytest.raises(ValueError, match="does not fit a segment"):
        TableSegment.create((0, "1", bytes(32)), [(rows, PAGE)], end, False, first)

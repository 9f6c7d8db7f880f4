"""The pages of each rank in the memory of a module's tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Extent:
    """Consecutive rows of one table that a rank owns.

    Attributes:
        owner: rank that owns them.
        begin: place of the first byte.
        end: place after the last byte.
    """

    owner: int
    begin: int
    end: int


@dataclass(frozen=True)
class PageShare:
    """Consecutive pages that one rank has.

    Attributes:
        owner: rank that has them.
        begin: place of the first byte, in the memory of all tables.
        end: place after the last byte.
        offset: place of the first byte among the owner's.
    """

    owner: int
    begin: int
    end: int
    offset: int


def page_shares(extents: Sequence[Extent], total: int, page: int) -> list[PageShare]:
    """Cuts the memory of all tables into the ranks' shares.

    A page belongs to the rank that owns its first byte. So shares are whole pages, and for each of
    its extents a rank has at most one page more.

    Args:
        extents: extents of all tables, which do not overlap.
        total: bytes of all tables, a number of whole pages.
        page: bytes of a page.

    Returns:
        The shares in the order of their first bytes. Together they are `total` bytes.
    """
    in_order = sorted((extent for extent in extents if extent.end > extent.begin), key=_begin)
    cuts = [-(-extent.begin // page) * page for extent in in_order[1:]]
    free: dict[int, int] = {}
    shares: list[PageShare] = []
    for extent, begin, end in zip(in_order, [0, *cuts], [*cuts, total], strict=True):
        if begin == end:
            continue
        offset = free.get(extent.owner, 0)
        free[extent.owner] = offset + end - begin
        shares.append(PageShare(extent.owner, begin, end, offset))
    return shares


def cuts_between(shares: Sequence[PageShare]) -> list[int]:
    """Returns the bytes at which another rank's share begins."""
    return [after.begin for before, after in pairwise(shares) if before.owner != after.owner]


def _begin(extent: Extent) -> int:
    return extent.begin

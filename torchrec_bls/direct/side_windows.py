"""The memory of tables that are refreshed by row, mapped once for all versions."""

from collections.abc import Sequence
from typing import NamedTuple

from torchrec_bls import _native
from torchrec_bls.direct.part_index import Side

#: A segment, a place in it, and a number of bytes.
Pages = tuple[_native.TableSegment, int, int]


class _Kept(NamedTuple):
    """The window of a side.

    Attributes:
        places: device, inode, offset and size of its pages. No other file can have the numbers of
            one that is mapped.
        window: the window.
        pages: its pages.
    """

    places: list[tuple[int, int, int, int]]
    window: _native.TableWindow
    pages: list[Pages]


class SideWindows:
    """The windows of the two copies of a module's tables.

    Each second version lies in the same memory. So that is mapped when the first one of them comes,
    and stays mapped until a version comes whose tables stay as they are. Its files stay open, so
    that each version need not look for them again.
    """

    def __init__(self) -> None:
        self._kept: dict[Side, _Kept] = {}

    def of(self, side: Side, pages: Sequence[Pages]) -> _native.TableWindow:
        """Returns the window of a side's pages, all of which are there.

        Raises:
            BLSError: they can't be mapped.
        """
        before = self._kept.get(side)
        if before is not None and before.pages == pages:  # the same segments, as in most versions
            return before.window
        places = [(*segment.address[2:4], offset, size) for segment, offset, size in pages]
        if before is not None and before.places == places:
            return before.window
        window = populated_window(pages)
        self._kept[side] = _Kept(places, window, list(pages))
        return window

    def shows(self, side: Side, files: set[tuple[int, int]]) -> bool:
        """Returns whether the window of a side has some files, by device and inode."""
        kept = self._kept.get(side)
        return kept is not None and files <= {place[:2] for place in kept.places}

    @property
    def all(self) -> list[_native.TableWindow]:
        """Returns the windows that stay mapped."""
        return [kept.window for kept in list(self._kept.values())]

    def forget(self) -> None:
        """Keeps no window mapped any more. Generations that are read keep theirs."""
        self._kept.clear()


def populated_window(pages: Sequence[Pages]) -> _native.TableWindow:
    """Returns a window with all its pages. Raises BLSError if they can't be mapped."""
    window = _native.TableWindow(pages)
    window.populate()
    return window

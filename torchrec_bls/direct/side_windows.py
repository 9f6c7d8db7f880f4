"""The memory of tables that are refreshed by row, mapped once for all versions."""

from collections.abc import Sequence

from torchrec_bls import _native
from torchrec_bls.direct.part_index import Side

#: A segment, a place in it, and a number of bytes.
Pages = tuple[_native.TableSegment, int, int]


class SideWindows:
    """The windows of the two copies of a module's tables.

    Each second version lies in the same memory. So that is mapped when the first one of them comes,
    and stays mapped until a version comes whose tables stay as they are.
    """

    def __init__(self) -> None:
        # With each window the places of its pages. No other file can have the numbers of one that
        # is mapped.
        self._kept: dict[Side, tuple[list[tuple[int, int, int, int]], _native.TableWindow]] = {}

    def of(self, side: Side, pages: Sequence[Pages]) -> _native.TableWindow:
        """Returns the window of a side's pages, all of which are there.

        Raises:
            BLSError: they can't be mapped.
        """
        places = [(*segment.address[2:4], offset, size) for segment, offset, size in pages]
        before = self._kept.get(side)
        if before is not None and before[0] == places:
            return before[1]
        window = populated_window(pages)
        self._kept[side] = places, window
        return window

    @property
    def all(self) -> list[_native.TableWindow]:
        """Returns the windows that stay mapped."""
        return [window for _, window in list(self._kept.values())]

    def forget(self) -> None:
        """Keeps no window mapped any more. Generations that are read keep theirs."""
        self._kept.clear()


def populated_window(pages: Sequence[Pages]) -> _native.TableWindow:
    """Returns a window with all its pages. Raises BLSError if they can't be mapped."""
    window = _native.TableWindow(pages)
    window.populate()
    return window

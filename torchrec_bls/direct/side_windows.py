"""The memory of tables that are refreshed by row, mapped once for all versions."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_bls import _native
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.gpu.registered_tables import RegisteredTables
from torchrec_bls.direct.part_index import Side

#: A segment, a place in it, and a number of bytes.
Pages = tuple[_native.TableSegment, int, int]


@dataclass
class _Kept:
    """The window of a side.

    Attributes:
        places: device, inode, offset and size of its pages. No other file can have the numbers of
            one that is mapped.
        window: the window.
        pages: its pages.
        registered: the same pages as a GPU reads them; None: none does so far.
    """

    places: list[tuple[int, int, int, int]]
    window: _native.TableWindow
    pages: list[Pages]
    registered: RegisteredTables | None = None


class SideWindows:
    """The windows of the two copies of a module's tables.

    Each second version lies in the same memory. So that is mapped when the first one of them comes,
    registered with the GPU that reads it, if one does, and stays so until a version comes whose
    tables stay as they are. Its files stay open, so that each version need not look for them again.
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

    def registered(
        self, window: _native.TableWindow, pages: Sequence[Pages], gpu: Gpu
    ) -> RegisteredTables:
        """Returns the pages of a side's window as a GPU reads them: the same for all versions.

        Raises:
            RegistrationError: the GPU can't read them.
            BLSError: they can't be mapped once more.
        """
        for kept in list(self._kept.values()):
            if kept.window is window:
                if kept.registered is None:
                    kept.registered = RegisteredTables(gpu, pages)
                return kept.registered
        return RegisteredTables(gpu, pages)  # another thread has found a version without sides

    def shows(self, side: Side, files: set[tuple[int, int]]) -> bool:
        """Returns whether the window of a side has some files, by device and inode."""
        kept = self._kept.get(side)
        return kept is not None and files <= {place[:2] for place in kept.places}

    @property
    def all(self) -> list[_native.TableWindow]:
        """Returns the windows that stay mapped."""
        found = []
        for kept in list(self._kept.values()):
            found.append(kept.window)
            if kept.registered is not None:
                found.append(kept.registered.window)
        return found

    def forget(self) -> None:
        """Keeps no window mapped any more. Generations that are read keep theirs."""
        self._kept.clear()


def populated_window(pages: Sequence[Pages]) -> _native.TableWindow:
    """Returns a window with all its pages. Raises BLSError if they can't be mapped."""
    window = _native.TableWindow(pages)
    window.populate()
    return window

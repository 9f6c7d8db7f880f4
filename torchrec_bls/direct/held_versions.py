"""The versions of a module's tables that this process has in memory."""

import weakref
from collections.abc import Iterable


class HeldVersions:
    """The versions of a module's tables that are mapped in this process.

    A version is held as long as any of its mappings exists, whoever keeps it: the generation that
    is read, a lookup of another thread, the module's weights, or a tensor that somebody has taken
    from them. So each mapping is watched, not what keeps it.
    """

    def __init__(self) -> None:
        # An entry goes when its mapping is gone, not when that begins to go: unmapping takes long.
        self._serials: dict[weakref.ref[object], int] = {}

    def add(self, serial: int, mappings: Iterable[object]) -> None:
        """Notes mappings of a version. A mapping that several versions share counts as one of the
        version that it was noted for last."""
        for each in mappings:
            self._serials[weakref.ref(each, self._serials.pop)] = serial

    def oldest(self, newest: int) -> int:
        """Returns the serial number of the oldest version that is held; `newest` if none is."""
        return min(list(self._serials.values()), default=newest)

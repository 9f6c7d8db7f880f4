"""The versions of a model on its control pages, as one of its processes sees and changes them."""

import time
from collections.abc import Callable, Sequence

from torchrec_bls.direct.owner_part import OwnerPart
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.errors import BLSError

# Seconds between two looks while waiting.
PAUSE = 0.005


class Versions:
    """Which version serves, and which ones owners have announced.

    The page of the first module decides. The pages of the others have records alone.

    Args:
        tables: tables of each module.
    """

    def __init__(self, tables: Sequence[SharedTables]) -> None:
        self._tables = list(tables)
        self._lead = self._tables[0].page
        self._owners = range(self._tables[0].owners)

    @property
    def serial(self) -> int:
        """Returns the serial number of the version that serves."""
        return self._lead.serial

    @property
    def serving(self) -> tuple[int, str]:
        """Returns the serial number and the name of the version that serves."""
        return self._lead.serving

    def pending(self) -> dict[int, str]:
        """Returns the version that each owner has announced and that does not serve yet, by owner.
        Owners without one are left out."""
        announced = {owner: self._lead.pending(owner)[1] for owner in self._owners}
        return {owner: version for owner, version in announced.items() if version}

    def missing(self, version: str) -> list[int]:
        """Returns the owners that have not announced a version."""
        pending = self.pending()
        return [owner for owner in self._owners if pending.get(owner) != version]

    def clear_way(
        self, owner: int, version: str, end: float, is_intact: Callable[[], bool]
    ) -> tuple[int, bool]:
        """Waits until an owner may announce a version.

        What the owner has pending goes first. It is withdrawn if another owner has skipped it, or
        after `end`.

        Args:
            owner: owner for which this process publishes.
            version: version to be announced.
            end: end of the wait for what is pending, in `time.monotonic()`.
            is_intact: function that returns whether what serves can be mapped. If an owner has
                taken it with it, the version is announced anew.

        Returns:
            The serial number that the version serves with, or would; and whether it is still to be
            announced.

        Raises:
            ValueError: another owner has withdrawn this version and announced another one.
        """
        # Whoever has given it up itself wants it again, whatever the others did meanwhile.
        comes_again = self.was_withdrawn(owner, self.serial + 1, version)
        while True:
            self._lead.settle()
            next_serial, pending = self._lead.pending(owner)
            serial, serving = self._lead.serving
            if serving == version and not pending and is_intact():
                return serial, False
            if not comes_again:
                self._refuse_withdrawn(owner, version, serial + 1)
            if not pending:  # so that nothing else can serve meanwhile
                return serial + 1, True
            if pending == version and self.is_held(owner, next_serial, version):
                return next_serial, False
            skipped = set(self.pending().values()) - {pending}
            if skipped or pending == version or time.monotonic() >= end:
                self._lead.withdraw(owner)
            else:
                time.sleep(PAUSE)

    def announce(self, owner: int, serial: int, version: str, parts: Sequence[OwnerPart]) -> None:
        """Makes an owner's parts of a version known, one a module, by one store. If it has a side,
        that has all its rows."""
        if parts[0].side is not None:
            self._lead.set_serial_on(parts[0].side, serial)
        for tables, part in zip(self._tables, parts, strict=True):
            tables.page.record(owner, serial, version, part.index.address)
        self._lead.announce(owner, serial)

    def withdraw_lost(self, owner: int) -> None:
        """Withdraws what an owner has announced, if no process holds it any more. The caller acts
        for the owner."""
        serial, version = self._lead.pending(owner)
        if version and not self.is_held(owner, serial, version):
            self._lead.withdraw(owner)

    def was_withdrawn(self, owner: int, serial: int, version: str) -> bool:
        """Returns whether an owner has withdrawn a version last."""
        return self._lead.withdrawn(owner) == (serial, version)

    def _refuse_withdrawn(self, owner: int, version: str, serial: int) -> None:
        for other, pending in self.pending().items():
            given_up = self._lead.withdrawn(other) == (serial, version)
            if other != owner and given_up and pending != version:
                raise ValueError(
                    f"rank {other} has waited for version {version!r} in vain, and has announced "
                    f"version {pending!r} instead: publish that one"
                )

    def is_held(self, owner: int, serial: int, version: str) -> bool:
        """Returns whether a process still holds what was announced. The one that announced it may
        be gone, before any other has mapped it."""
        try:
            for tables in self._tables:
                tables.open(owner, serial, version)
        except BLSError:
            return False
        return True

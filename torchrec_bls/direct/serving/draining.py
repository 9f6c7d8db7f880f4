"""Makes the memory of a version free before the next one is made, for hosts that can't hold two.

docs/design/tables-for-a-service.md says which states there are, and who may die in them.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from torchrec_bls.direct.arguments import DRAINED_VERSION
from torchrec_bls.direct.owner_part import HeldPiece
from torchrec_bls.direct.process import this_process
from torchrec_bls.direct.serving.publisher import Publisher
from torchrec_bls.direct.serving.readers import processes_told, readers_of
from torchrec_bls.direct.serving.switches import Switches
from torchrec_bls.direct.steps import Content
from torchrec_bls.errors import PeerTimeoutError, RendezvousError

# Seconds between two looks at all readers.
_PAUSE = 0.02

#: Pieces of each module that a version shares with the one before, by number.
Staying = Sequence[Mapping[int, HeldPiece]]


class Draining:
    """Has all processes let go of the version that serves. This process owns all tables.

    The version without rows serves then. It is an ordinary one: it is announced, mapped, and taken
    by a switch as any other. Lookups in it raise DrainedError.

    Args:
        publisher: publisher of the tables.
        switches: switches of this process's model.
    """

    def __init__(self, publisher: Publisher, switches: Switches) -> None:
        self._publisher = publisher
        self._switches = switches
        self._tables = list(publisher.tables.values())

    def drain(
        self, owner: int, version: str, contents: Sequence[Content], deadline: float
    ) -> Staying:
        """Returns when no process has the version that serves in memory, but for the pieces that it
        returns. If that takes too long or is interrupted, this version is announced again.

        The content is read once before anything is announced, so that a checkpoint with a fault
        drains nothing. Nor does one with the rows that serve already.

        Args:
            owner: owner of the tables.
            version: version that will be made.
            contents: its content, of each module.
            deadline: seconds to wait for all readers.

        Raises:
            ValueError: rows can't be read, or have weights that are NaN or infinite; or weights of
                this process were written to.
            PeerTimeoutError: processes have not let go by then; the text names them.
            BLSError: what serves can't be mapped here.
        """
        self._refuse_writes()
        versions = self._publisher.versions
        serial, serving = versions.serving
        # Of its own, beside those that this process lets go of as all readers do.
        before = [tables.open(owner, serial, serving) for tables in self._tables]
        if before[0].drained_for:  # since an earlier call failed
            self._wait(serial, serving, deadline)
            return [{} for _ in before]
        stay = [
            part.staying(tables.cuts[owner], content)
            for part, tables, content in zip(before, self._tables, contents, strict=True)
        ]
        if all(len(of) == len(part.pieces) for of, part in zip(stay, before, strict=True)):
            return stay
        empty = [tables.drained(owner, version) for tables in self._tables]
        drained, end = serial + 1, time.monotonic() + deadline
        try:
            self._publisher.announce(owner, drained, DRAINED_VERSION, empty, end)
            self._wait(drained, serving, deadline)
        except BaseException:
            if versions.serial == drained:
                self._publisher.announce(owner, drained + 1, serving, before, end)
            raise
        return stay

    def _refuse_writes(self) -> None:
        with self._switches.gate.lock:
            if self._switches.would_lose_writes:
                raise ValueError(
                    "weights of this process were written to in place, which is lost when the "
                    "tables are drained: publish them before, or don't write to them"
                )

    def _wait(self, drained: int, serving: str, deadline: float) -> None:
        end = time.monotonic() + deadline
        while holders := self._holders(drained):
            if time.monotonic() >= end:
                self._refuse(holders, serving, deadline)
            time.sleep(_PAUSE)

    def _holders(self, drained: int) -> list[int]:
        """Returns the processes that have an older version in memory."""
        readers = readers_of(self._tables[0].page)
        holders = {pid for pid, oldest in readers.items() if oldest < drained}
        # This process may have no slot.
        if any(tables.held.oldest(drained) < drained for tables in self._tables):
            holders.add(this_process().pid)
        return sorted(holders)

    def _refuse(self, holders: Sequence[int], serving: str, deadline: float) -> NoReturn:
        who = processes_told(holders)
        if serving == DRAINED_VERSION:
            raise PeerTimeoutError(
                f"processes {who} still have the version before in memory after {deadline} s, and "
                "the tables stay drained: end these processes, or continue them if they are "
                "stopped, and publish again"
            )
        raise PeerTimeoutError(
            f"processes {who} have not let go of version {serving!r} within {deadline} s, which "
            "serves again. A process that is stopped, stays in a forward, or keeps tensors of its "
            "weights holds it: end it, or give a longer deadline"
        )


@contextmanager
def outcome_told(publisher: Publisher) -> Iterator[None]:
    """Has the errors of making a version say what serves, if that is nothing."""
    try:
        yield
    except (ValueError, RendezvousError) as error:
        if publisher.versions.serving[1] != DRAINED_VERSION:
            raise
        kind = ValueError if isinstance(error, ValueError) else RendezvousError
        raise kind(
            f"{error}. The tables are drained already, and stay so until a version is published: "
            "forwards raise DrainedError until then"
        ) from error

"""Announces versions that differ in some rows from the one before.

docs/design/row-refresh.md describes the protocol, and says why no batch sees two versions.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.owner_part import OwnerPart
from torchrec_bls.direct.part_index import Facts, Label, Side, other_side
from torchrec_bls.direct.row_copies import OWNER, RowCopies
from torchrec_bls.direct.row_deltas import RowDeltas, deltas_of
from torchrec_bls.direct.serving.handing_on import await_a_holder
from torchrec_bls.direct.serving.publisher import Publication, Publisher
from torchrec_bls.direct.serving.readers import holders_of_side, processes_told
from torchrec_bls.errors import PeerTimeoutError

#: Dense weights by name; None: a version has none of its own, and readers keep what they have.
Dense = Mapping[str, Any] | None
#: Raises ValueError if a version may not serve: its serial number, parts and dense weights.
Check = Callable[[int, Sequence[OwnerPart], Dense], None]

# Seconds between two looks at the readers. A forward takes about as long.
_PAUSE = 0.0005
# Seconds that a reader may take to map the version that serves. Only stopped ones take longer.
_HANDING_ON = 1.0


class RowPublisher:
    """Writes rows to the tables that do not serve, and announces them. This process owns all tables
    of the model.

    Args:
        publisher: publisher of the tables.
    """

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._tables = publisher.tables
        self._lead = next(iter(self._tables.values())).page
        self._copies = [RowCopies(each) for each in self._tables.values()]

    def forget(self) -> None:
        """Gives the copies up, since a whole version comes."""
        for copies in self._copies:
            copies.forget()

    def publish(
        self,
        version: str,
        base: str,
        rows: Mapping[str, Any],
        dense_after: Callable[[Dense], Dense],
        check: Check,
        trained: float | None,
        deadline: float,
    ) -> Publication:
        """Publishes rows; see the function `publish_rows`.

        Args:
            version: see `publish_rows`.
            base: see `publish_rows`.
            rows: see `publish_rows`.
            dense_after: function that returns the dense weights of the new version, from those that
                were published with `base`. It raises ValueError if there can be none.
            check: called with the new version before it is announced.
            trained: see `publish_rows`.
            deadline: see `publish_rows`.
        """
        deltas = deltas_of(self._tables, rows)
        end = time.monotonic() + deadline
        with self._publisher.one_at_a_time(end):
            serial, is_new = self._publisher.clear_way(OWNER, version, end)
            _, serves = self._publisher.versions.serving
            if serves != base:
                raise ValueError(
                    f"these rows belong on version {base!r}, but {serves!r} serves: publish the "
                    "rows that have changed since that one, or the whole version"
                )
            if not is_new:
                raise ValueError(f"version {version!r} serves already: give the new one a name")
            self._publisher.follower.await_later(serial - 2, end - time.monotonic())
            serving = self._publisher.follower.newest
            dense = dense_after(serving[0].parts[OWNER].dense_weights())
            parts = self._parts(version, serving, deltas, dense, trained, end, deadline)
            check(serial, parts, dense)
            self._publisher.announce(OWNER, serial, version, parts, end)
            for copies, of_module in zip(self._copies, deltas, strict=True):
                copies.announced(of_module)
        return Publication(version, False, OWNER, serial, self._publisher, parts)

    def _parts(
        self,
        version: str,
        serving: tuple[Generation, ...],
        deltas: list[RowDeltas],
        dense: Dense,
        trained: float | None,
        end: float,
        deadline: float,
    ) -> list[OwnerPart]:
        """Writes a version to the side that does not serve; returns its parts, one a module."""
        begin = time.monotonic()
        side = other_side(serving[0].side)
        before = [generation.parts[OWNER] for generation in serving]
        in_order = list(zip(self._copies, before, deltas, strict=True))
        made = [copies.prepare(part, version, of_module) for copies, part, of_module in in_order]
        if self._lead.serial_on(side) != 0:
            # Readers may have the version there alone, and could read nothing if this process died.
            await_a_holder(self._lead, serving, min(_HANDING_ON, end - time.monotonic()))
        # From here on until it is announced the side has no version, whatever ends this.
        self._lead.set_serial_on(side, 0)
        self._await_readers(side, end, deadline)
        for copies, part, of_module in in_order:
            copies.write(side, part, of_module)
        parts: list[OwnerPart] = []
        for tables, new, (copies, part, of_module) in zip(
            self._tables.values(), made, in_order, strict=True
        ):
            written = new + sum(delta.stored.nbytes for delta in of_module.values())
            reused = max(0, tables.cuts[OWNER].size - written)
            facts = Facts(time.time(), time.monotonic() - begin, written, reused, trained)
            label, pieces = Label(OWNER, version, tables.digest), copies.pieces(side, part)
            # The first module's part has the dense weights.
            own_dense, others = None if parts else dense, copies.others(side)
            parts.append(OwnerPart.of_pieces(label, pieces, facts, own_dense, side, others))
        return parts

    def _await_readers(self, side: Side, end: float, deadline: float) -> None:
        """Returns when nobody reads a side any more, on which there is no version.

        Raises:
            PeerTimeoutError: somebody does after `end`.
        """
        while holders := holders_of_side(self._lead, side):
            if time.monotonic() >= end:
                raise PeerTimeoutError(
                    f"processes {processes_told(holders)} still run a batch of an older version "
                    f"after {deadline} s, whose rows would be written over: end a process that is "
                    "stopped or stays in a forward, or give a longer deadline. Nothing is announced"
                )
            time.sleep(_PAUSE)

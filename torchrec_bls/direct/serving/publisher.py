"""Announces versions of a model's tables from one process."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import count
from typing import Any

from torchrec_bls._deprecated import with_old_names
from torchrec_bls.collective.transport.deadlines import check_deadline
from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.new_weights import named_source, trained_at
from torchrec_bls.direct.owner_part import HeldPiece, OwnerPart
from torchrec_bls.direct.process import is_alive, this_process
from torchrec_bls.direct.serving.follower import Follower
from torchrec_bls.direct.serving.ownership import Ownership
from torchrec_bls.direct.serving.versions import PAUSE, Versions
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.direct.steps import Content
from torchrec_bls.errors import PeerTimeoutError
from torchrec_bls.lifetime import whole_at_forks
from torchrec_bls.turn import Turn


class Publisher:
    """One process's side of the versions of a model's tables.

    Args:
        tables: tables of each module, in the same order in every process, by the prefix of their
            names in a state dict of the model ("sparse.embedding_bags.").
        serving: generation of each module that is read now.
        publishes: whether this process publishes the tables of a rank.

    Attributes:
        tables: see above.
        follower: follower that maps what serves.
        versions: versions on the control pages.
        owners: the ranks that own tables.
    """

    def __init__(
        self,
        tables: Mapping[str, SharedTables],
        serving: tuple[Generation, ...],
        publishes: bool,
    ) -> None:
        self.tables = dict(tables)
        every = list(self.tables.values())
        self.versions = Versions(every)
        self.follower = Follower(every, serving, publishes)
        pages = [each.page for each in every]
        self._lead, self._ownership = pages[0], Ownership(pages)
        self.owners = range(every[0].owners)
        self._publishing = Turn()
        self._unnamed = count(1)

    def named(self, version: str | None) -> str:
        """Returns `version`, or a name for a version without one.

        Raises:
            ValueError: it has no name, and there are several owners.
        """
        if version is not None:
            return version
        if len(self.owners) > 1:
            raise ValueError(
                f"{len(self.owners)} ranks publish these tables, and a version serves once all "
                "have announced it: say which one this is, publish(..., version=...), by a name "
                "that is the same on all ranks, such as that of the checkpoint"
            )
        return f"{this_process().identity:x}-{next(self._unnamed)}"

    def one_at_a_time(self, end: float) -> AbstractContextManager[None]:
        """Keeps the other threads of this process from publishing.

        Args:
            end: end of the wait for them, in `time.monotonic()`.

        Raises:
            PeerTimeoutError: a thread has not finished by then.
        """
        busy = PeerTimeoutError("another thread of this process has not finished publishing")
        return self._publishing.taken(end, busy)

    def publish_for(
        self,
        owner: int,
        version: str,
        state_dict: Mapping[str, Any] | None,
        dense: Mapping[str, Any] | None,
        deadline: float,
    ) -> "Publication":
        """Publishes the tables of a rank whose process is gone.

        Args:
            owner: rank whose process is gone.
            version: name of the version.
            state_dict: state dict with whole tables.
            dense: weights that are published with the tables, by name.
            deadline: seconds until what the rank has pending is withdrawn, and to wait for another
                process that acts for it.

        Raises:
            ValueError: see `publish`. Or the rank lives, or another process publishes for it.
            PeerTimeoutError: another process that acts for the rank has not finished.
            RendezvousError: there is no memory for two versions.
        """
        if state_dict is None:
            raise ValueError(f"the tables of rank {owner} have to come in a state_dict")
        end = time.monotonic() + deadline
        with self.one_at_a_time(end), self._ownership.in_place_of(owner, end):
            serial, serving = self.versions.serving
            # What is pending may be of a process that is further.
            if serving == version and self._is_intact():
                return Publication(version, True, owner, serial, self, [])
            with named_source(state_dict):
                contents = self.contents(owner, state_dict)
            serial, is_new = self.clear_way(owner, version, end)
            parts = []
            if is_new:
                with named_source(state_dict):
                    trained = trained_at(state_dict)
                    parts = self.create(owner, version, contents, dense, trained=trained)
                self.announce(owner, serial, version, parts, end)
        return Publication(version, not is_new, owner, serial, self, parts)

    def contents(self, owner: int, state_dict: Mapping[str, Any]) -> list[Content]:
        """Returns the content of an owner's bytes from a state dict, for each module.

        Raises:
            ValueError: a table is missing, or has a wrong shape or dtype; or a checkpoint has more
                tables.
        """
        return [tables.content(owner, prefix, state_dict) for prefix, tables in self.tables.items()]

    @whole_at_forks()
    def create(
        self,
        owner: int,
        version: str,
        contents: Sequence[Content],
        dense: Mapping[str, Any] | None,
        before: Sequence[Mapping[int, HeldPiece]] | None = None,
        trained: float | None = None,
    ) -> list[OwnerPart]:
        """Makes an owner's parts of a version, one a module. Other processes do not know them yet.

        Args:
            owner: rank that owns the tables.
            version: name of the version.
            contents: content of the owner's bytes in each module.
            dense: weights that are published with the first module's tables, by name.
            before: the owner's pieces of another version by number, of each module, which stay if
                their rows are the same. None: those of the newest version that is mapped here.
            trained: see Facts.

        Raises:
            RendezvousError: there is no memory for them.
            ValueError: rows can't be read, or have weights that are NaN or infinite.
        """
        if before is None:
            before = [each.parts[owner].numbered for each in self.follower.newest]
        return [
            tables.create(owner, version, content, None if module else dense, pieces, trained)
            for module, (tables, content, pieces) in enumerate(
                zip(self.tables.values(), contents, before, strict=True)
            )
        ]

    @whole_at_forks()
    def generations(
        self, version: str, serial: int, parts: Sequence[OwnerPart]
    ) -> list[Generation]:
        """Maps a version that nobody else knows yet. This process owns all tables.

        Args:
            version: name of the version.
            serial: serial number that it would serve with.
            parts: part of each module.
        """
        return [
            tables.generation(version, serial, [part])
            for tables, part in zip(self.tables.values(), parts, strict=True)
        ]

    def clear_way(self, owner: int, version: str, end: float) -> tuple[int, bool]:
        """Waits until an owner may announce a version, see Versions.clear_way."""
        return self.versions.clear_way(owner, version, end, self._is_intact)

    def _is_intact(self) -> bool:
        """Returns whether the version that serves can be mapped, or is."""
        serial, version = self.versions.serving
        return self.follower.newest[0].serial >= serial or all(
            self.versions.is_held(owner, serial, version) for owner in self.owners
        )

    def announce(
        self,
        owner: int,
        serial: int,
        version: str,
        parts: Sequence[OwnerPart],
        end: float,
    ) -> None:
        """Makes an owner's parts known. When all owners have announced a version, it serves.

        What an owner that is gone has taken with it is withdrawn before: nobody could map the
        version that it would complete.

        Args:
            owner: rank that owns the tables.
            serial: serial number of the version.
            version: name of the version.
            parts: part of each module.
            end: end of the wait for another process that acts for an owner that is gone, in
                `time.monotonic()`.
        """
        for other in self.versions.pending():
            if other != owner and not is_alive(self._lead.process(other)):
                # It is back, or another process acts for it: that one looks as well.
                with (
                    suppress(ValueError, PeerTimeoutError),
                    self._ownership.in_place_of(other, end),
                ):
                    self.versions.withdraw_lost(other)
        self.follower.keep(owner, serial, version, parts)
        self.versions.announce(owner, serial, version, parts)

    def give_up(self, owner: int) -> None:
        """Lets another process publish for a rank of this process."""
        self._ownership.give_up(owner)

    def dense_weights(self, serving: Generation) -> dict[str, Any] | None:
        """Returns the dense weights that an owner published with its tables, or None if no owner
        did.

        Args:
            serving: generation of the first module.

        Raises:
            ProtocolError: the bytes after an owner's index are something else.
        """
        for part in serving.parts:
            dense = part.dense_weights()
            if dense is not None:
                return dense
        return None

    @property
    def problem(self) -> str:
        """Returns why this process does not read what the ranks publish; empty if it does."""
        by = self._lead.abandoned_by
        if by is None:
            return self.follower.problem
        return (
            f"rank {by} has shared its tables anew or has freed the model, and publishes them no "
            "more here: attach to the process that offers the new ones"
        )

    def owners_gone(self) -> list[int]:
        """Returns the ranks whose tables are read although no living process publishes for them."""
        return [owner for owner in self.owners if not is_alive(self._lead.process(owner))]

    def why_not(self, version: str) -> str:
        """Returns why a version that an owner has announced does not serve here."""
        missing = self.versions.missing(version)
        if self.versions.serving[1] == version or not missing:
            return self.follower.problem or "it is still being mapped"
        pending = self.versions.pending()
        others = {owner: pending[owner] for owner in missing if owner in pending}
        text = f"ranks {missing} have not published it"
        if others:
            text += f", and have announced {others}"
        gone = [owner for owner in missing if not is_alive(self._lead.process(owner))]
        if gone:
            text += f", of which {gone} have no process: publish(owner=...) for them"
        return text


@with_old_names
class Publication:
    """A version that `publish` has announced.

    Attributes:
        version: name of the version.
        was_announced: whether there was nothing to do: the version served already, or was announced
            and waits for other ranks.
        bytes_written: bytes of tables that this call has written.
        bytes_reused: bytes of tables that are those of an earlier version, because their source
            rows are.
    """

    def __init__(
        self,
        version: str,
        was_announced: bool,
        owner: int,
        serial: int,
        publisher: Publisher,
        parts: Sequence[OwnerPart],
    ) -> None:
        self.version = version
        self.was_announced = was_announced
        self.bytes_written = sum(part.facts.bytes_written for part in parts)
        self.bytes_reused = sum(part.facts.bytes_reused for part in parts)
        self._owner = owner
        self._serial = serial
        self._publisher = publisher

    @property
    def serves(self) -> bool:
        """Returns whether the next batch of this process sees this version."""
        newest = self._publisher.follower.newest[0]
        return (newest.serial, newest.version) == (self._serial, self.version)

    def wait(self, deadline: float = 60.0) -> None:
        """Returns as soon as the version serves: all owners have announced it and it is mapped. It
        also returns if the version has served and a later one does.

        Args:
            deadline: seconds to wait.

        Raises:
            PeerTimeoutError: the version does not serve by then, or was withdrawn. The text names
                the ranks that have not announced it, or says why it can't be mapped.
        """
        check_deadline(deadline)
        self._publisher.follower.start()  # a forked child may have inherited the publication
        end = time.monotonic() + deadline
        versions = self._publisher.versions
        while not self.serves:
            read = self._publisher.follower.newest[0].serial
            if read == self._serial or versions.was_withdrawn(
                self._owner, self._serial, self.version
            ):
                raise PeerTimeoutError(
                    f"version {self.version!r} was withdrawn before all ranks had announced it: "
                    f"version {versions.serving[1]!r} serves, and ranks have announced "
                    f"{versions.pending()}"
                )
            if read > self._serial:
                return
            if time.monotonic() >= end:
                raise PeerTimeoutError(
                    f"version {self.version!r} does not serve after {deadline} s: "
                    f"{self._publisher.why_not(self.version)}"
                )
            time.sleep(PAUSE)

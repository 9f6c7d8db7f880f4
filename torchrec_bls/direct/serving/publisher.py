"""Announces the next generation of a model's tables from one process."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torchrec_bls import _native
from torchrec_bls.collective.transport.deadlines import check_deadline
from torchrec_bls.direct.dense_weights import Parts
from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.holders import is_alive
from torchrec_bls.direct.new_weights import cut, entry_of
from torchrec_bls.direct.serving.follower import Follower
from torchrec_bls.direct.serving.ownership import Ownership
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.errors import PeerTimeoutError
from torchrec_bls.turn import Turn

# Seconds between two looks while waiting.
_PAUSE = 0.005


class Publisher:
    """One process's side of the generations of a model's tables.

    Args:
        tables: tables of each module, in the same order in every process, by the prefix of their
            names in a state dict of the model ("sparse.embedding_bags.").
        serving: generation of each module that is read now.

    Attributes:
        tables: see above.
        follower: follower that maps what is announced.
    """

    def __init__(self, tables: Mapping[str, SharedTables], serving: tuple[Generation, ...]) -> None:
        self.tables = dict(tables)
        self.follower = Follower(list(self.tables.values()), serving)
        pages = [each.page for each in self.tables.values()]
        self._lead, self._ownership = pages[0], Ownership(pages)
        self._publishing = Turn()

    @property
    def newest(self) -> int:
        """Returns the generation of this process's next batch."""
        return self.follower.newest[0].number

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
        state_dict: Mapping[str, Any] | None,
        dense: Mapping[str, torch.Tensor] | None,
        deadline: float,
    ) -> "Publication":
        """Publishes the tables of a rank whose process is gone.

        Args:
            owner: rank whose process is gone.
            state_dict: state dict with whole tables.
            dense: weights that are published with the tables, by name.
            deadline: seconds to wait for all ranks to announce the generation before.

        Raises:
            ValueError: see `publish`. Or the rank lives, or another process publishes for it.
            PeerTimeoutError: a rank has not announced the generation before.
            RendezvousError: there is no memory for two generations.
        """
        if state_dict is None:
            raise ValueError(f"the tables of rank {owner} have to come in a state_dict")
        end = time.monotonic() + deadline
        with self.one_at_a_time(end), self._in_place_of(owner):
            number = self.next_of(owner, end)
            parts = self.parts(owner, state_dict)
            self.announce(owner, number, self.create(owner, number, parts, dense))
            return Publication(number, self)

    @contextmanager
    def _in_place_of(self, owner: int) -> Iterator[None]:
        had_it = self._ownership.is_own(owner)
        try:
            if not had_it:
                self._ownership.take_over(owner)
            yield
        finally:
            if not had_it:  # nothing happens where it was not taken over
                self._ownership.give_up(owner)

    def next_of(self, owner: int, end: float) -> int:
        """Returns the number of an owner's next generation.

        Args:
            owner: rank that owns the tables.
            end: end of the wait for all owners to announce the last generation, in
                `time.monotonic()`.

        Raises:
            PeerTimeoutError: an owner has not announced it; the text names such owners.
        """
        last = self._lead.announced(owner)
        while self._lead.complete < last:
            if time.monotonic() >= end:
                raise PeerTimeoutError(
                    f"generation {last} does not serve yet: {self._missing(last)}. The next "
                    "generation can only follow it"
                )
            time.sleep(_PAUSE)
        return last + 1

    def parts(self, owner: int, state_dict: Mapping[str, Any]) -> list[Parts]:
        """Returns the content of an owner's next segment from a state dict, for each module.

        Raises:
            ValueError: a table is missing, or has a wrong shape or dtype.
        """
        return [
            [
                (
                    cut(key, entry_of(state_dict, key), layout, shard, tables.dtype),
                    tables.offsets[layout.name, shard],
                )
                for layout, shard in tables.shards_of(owner)
                for key in (f"{prefix}{layout.name}.weight",)
            ]
            for prefix, tables in self.tables.items()
        ]

    def table_keys(self) -> set[str]:
        """Returns the names of the tables in a state dict of the model."""
        return {
            f"{prefix}{table}.weight"
            for prefix, tables in self.tables.items()
            for table in tables.layouts
        }

    def create(
        self,
        owner: int,
        number: int,
        parts: Sequence[Parts],
        dense: Mapping[str, torch.Tensor] | None,
    ) -> list[_native.TableSegment]:
        """Makes an owner's segments of a generation, one a module. Other processes do not know them
        yet.

        Args:
            owner: rank that owns the tables.
            number: number of the generation.
            parts: content of each module's segment.
            dense: weights that are published with the first module's tables, by name.

        Raises:
            RendezvousError: there is no memory for the segments.
        """
        return [
            tables.create(owner, number, of_module, None if module else dense)
            for module, (tables, of_module) in enumerate(
                zip(self.tables.values(), parts, strict=True)
            )
        ]

    def announce(self, owner: int, number: int, segments: Sequence[_native.TableSegment]) -> None:
        """Makes an owner's segments known. The last owner completes the generation."""
        self.follower.keep(owner, number, segments)
        for tables, segment in zip(self.tables.values(), segments, strict=True):
            tables.page.record(owner, number, segment.address)
        self._lead.announce(owner, number)

    def wait_for(self, number: int, deadline: float) -> None:
        """Waits for a generation; see Publication.wait."""
        end = time.monotonic() + deadline
        while self.newest < number:
            if time.monotonic() >= end:
                raise PeerTimeoutError(
                    f"generation {number} does not serve after {deadline} s: "
                    f"{self._missing(number)}"
                )
            time.sleep(_PAUSE)

    def dense_weights(self, serving: Generation) -> dict[str, torch.Tensor] | None:
        """Returns the dense weights that an owner published with its tables, or None if no owner
        did.

        Args:
            serving: generation of the first module.

        Raises:
            ProtocolError: the bytes after an owner's tables are something else.
        """
        tables = next(iter(self.tables.values()))
        for owner, segment in enumerate(serving.segments):
            dense = tables.dense_weights(owner, segment)
            if dense is not None:
                return dense
        return None

    @property
    def announced(self) -> int:
        """Returns the last generation that all owners have announced."""
        return self._lead.complete

    def owners_gone(self) -> list[int]:
        """Returns the ranks whose tables are read although no living process publishes for them."""
        return next(iter(self.tables.values())).owners_gone()

    def _missing(self, number: int) -> str:
        owners = range(next(iter(self.tables.values())).owners)
        missing = [owner for owner in owners if self._lead.announced(owner) < number]
        if not missing:
            return self.follower.problem or "it is still being mapped"
        gone = [owner for owner in missing if not is_alive(self._lead.process(owner))]
        of_them = f", of which {gone} have no process: publish(owner=...) for them" if gone else ""
        return f"ranks {missing} have not published it{of_them}"


@dataclass(frozen=True)
class Publication:
    """A generation that `publish` has announced.

    Attributes:
        generation: number of the generation. The first forward makes number 1.
    """

    generation: int
    _publisher: Publisher

    @property
    def serves(self) -> bool:
        """Returns whether the next batch of this process sees this generation, or a later one."""
        return self._publisher.newest >= self.generation

    def wait(self, deadline: float = 60.0) -> None:
        """Returns as soon as the generation serves: all owners have announced it and it is mapped.

        Args:
            deadline: seconds to wait.

        Raises:
            PeerTimeoutError: the generation does not serve by then. The text names the ranks that
                have not announced it, or says why it can't be mapped.
        """
        check_deadline(deadline)
        self._publisher.wait_for(self.generation, deadline)

"""How a process announces the next generation of a model's tables."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torchrec_bls import _native
from torchrec_bls.direct.follower import Follower
from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.holders import is_alive, own_identity, pid_of
from torchrec_bls.direct.new_weights import cut, entry_of
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.errors import PeerTimeoutError

# Seconds between two looks of who waits.
_PAUSE = 0.005

# Contiguous tensors of a segment, and where they go, in bytes.
Parts = list[tuple[torch.Tensor, int]]


class Publisher:
    """The generations of a model's tables, from the side of one process.

    Args:
        tables: of each module, in the same order in every process, by what stands before a table's
            name in a state dict of the model ("sparse.embedding_bags.").
        serving: what is read of them now.

    Attributes:
        tables: see above.
        follower: maps what is announced.
    """

    def __init__(self, tables: Mapping[str, SharedTables], serving: Sequence[Generation]) -> None:
        self.tables = dict(tables)
        self.follower = Follower(list(self.tables.values()), serving)
        self._lead = next(iter(self.tables.values())).page
        self._publishing = threading.Lock()

    @property
    def newest(self) -> int:
        """The generation that the next batch of this process is of."""
        return self.follower.newest[0].number

    @contextmanager
    def one_at_a_time(self, end: float) -> Iterator[None]:
        """Keeps the other threads of this process from publishing.

        Args:
            end: of the wait for them, in `time.monotonic()`.

        Raises:
            PeerTimeoutError: one of them has not finished then.
        """
        if not self._publishing.acquire(timeout=max(0.0, end - time.monotonic())):
            raise PeerTimeoutError("another thread of this process has not finished publishing")
        try:
            yield
        finally:
            self._publishing.release()

    def publish_for(
        self, owner: int, state_dict: Mapping[str, Any] | None, deadline: float
    ) -> "Publication":
        """Publishes the tables of a rank whose process is gone.

        Args:
            owner: the rank.
            state_dict: has its tables, whole.
            deadline: in seconds, for all ranks to have announced the generation before.

        Raises:
            ValueError: see `publish`; or the rank lives, or another process is at it.
            PeerTimeoutError: not all have announced the generation before.
            RendezvousError: there is no memory for two generations.
        """
        if state_dict is None:
            raise ValueError(f"the tables of rank {owner} have to come in a state_dict")
        end = time.monotonic() + deadline
        with self.one_at_a_time(end), self._in_place_of(owner):
            number = self.next_of(owner, end)
            self.announce(owner, number, self.create(owner, number, self.parts(owner, state_dict)))
            return Publication(number, self)

    def take_over(self, owner: int) -> None:
        """Makes this process the one that publishes for a rank, until it ends.

        Raises:
            ValueError: the rank's process lives, or another one was quicker.
        """
        before = self._lead.process(owner)
        if is_alive(before):
            raise ValueError(
                f"rank {owner} lives, as process {pid_of(before)}: it publishes its tables itself"
            )
        if not self._lead.take_over(owner, before, own_identity()):
            raise ValueError(f"another process publishes for rank {owner} already")

    @contextmanager
    def _in_place_of(self, owner: int) -> Iterator[None]:
        if self._lead.process(owner) == own_identity():
            yield
            return
        self.take_over(owner)
        try:
            yield
        finally:
            # The process that comes back for this rank, or another one, may be next.
            self._lead.take_over(owner, own_identity(), 0)

    def next_of(self, owner: int, end: float) -> int:
        """Returns the number of an owner's next generation.

        Args:
            owner: rank.
            end: of the wait for all owners to have come to the last one, in `time.monotonic()`.

        Raises:
            PeerTimeoutError: names those that have not.
        """
        last = self._lead.announced(owner)
        while self._lead.complete < last:
            if time.monotonic() >= end:
                raise PeerTimeoutError(
                    f"generation {last} does not serve yet: {self._missing(last)}. Until it does, "
                    "there is no next one"
                )
            time.sleep(_PAUSE)
        return last + 1

    def parts(self, owner: int, state_dict: Mapping[str, Any]) -> list[Parts]:
        """Returns for each module what an owner's next segment holds, from a state dict.

        Raises:
            ValueError: a table is missing, or of a wrong shape or dtype.
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

    def create(self, owner: int, number: int, parts: Sequence[Parts]) -> list[_native.TableSegment]:
        """Makes an owner's segments of a generation, of all modules, that nobody knows of yet.

        Raises:
            RendezvousError: there is no memory for them.
        """
        return [
            tables.create(owner, number, of_module)
            for tables, of_module in zip(self.tables.values(), parts, strict=True)
        ]

    def announce(self, owner: int, number: int, segments: Sequence[_native.TableSegment]) -> None:
        """Makes an owner's segments known. With the last owner's the generation is complete."""
        self.follower.keep(owner, number, segments)
        for tables, segment in zip(self.tables.values(), segments, strict=True):
            tables.page.record(owner, number, segment.address)
        self._lead.announce(owner, number)

    def wait_for(self, number: int, deadline: float) -> None:
        """See Publication.wait."""
        end = time.monotonic() + deadline
        while self.newest < number:
            if time.monotonic() >= end:
                raise PeerTimeoutError(
                    f"generation {number} does not serve after {deadline} s: "
                    f"{self._missing(number)}"
                )
            time.sleep(_PAUSE)

    def owners_gone(self) -> list[int]:
        """Returns the ranks whose tables are read though no living process publishes for them."""
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
    """What `publish` has announced.

    Attributes:
        generation: its number, counted from 1, which the first forward made.
    """

    generation: int
    _publisher: Publisher

    @property
    def serves(self) -> bool:
        """Whether the next batch of this process is of this generation, or of a later one."""
        return self._publisher.newest >= self.generation

    def wait(self, deadline: float = 60.0) -> None:
        """Returns as soon as it `serves`: when all owners have announced it and it is mapped.

        Args:
            deadline: seconds to wait.

        Raises:
            PeerTimeoutError: names the ranks that have not announced it, or what keeps it from
                being mapped.
        """
        self._publisher.wait_for(self.generation, deadline)

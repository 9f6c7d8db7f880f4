"""The forms of the lines in a file of measurements, which other programs may have written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

from torchrec_bls.records import AboveZero, Amount, Positive, Ranks, Record, Whole

from ..costs.machine import Machine
from .configurations import LookupConfiguration
from .step_models import StepModel

# Of the ids of a step on all ranks. Drawn ones are far fewer.
_MOST_IDS = 1 << 28

Times = Annotated[list[AboveZero], msgspec.Meta(min_length=1)]
Plan = Literal["table_wise", "row_wise", "column_wise", "mixed"]


class Head(Record):
    """The first line: what is measured, and where."""

    format: str
    version: int
    settings: dict[str, Any]
    machine: Machine


class _Entry(Record, tag_field="kind"):
    seconds: Amount


class MemoryEntry(_Entry, tag="memory"):
    """See `measure_memory`."""

    buffer_bytes: Annotated[list[Positive], msgspec.Meta(min_length=1)]
    bytes_per_us: Times
    row_us: Times

    def __post_init__(self) -> None:
        """Raises ValueError for lists that do not belong together."""
        if not len(self.buffer_bytes) == len(self.bytes_per_us) == len(self.row_us):
            raise ValueError("buffer_bytes, bytes_per_us and row_us differ in length")


class WorkloadEntry(_Entry, tag="workload"):
    """A lookup, described before it is measured; see `LookupTimer.measure`."""

    index: Whole
    configuration: LookupConfiguration
    lookups: list[Whole]
    unique_rows: list[Whole]
    reuse_factors: list[list[Amount]]

    def __post_init__(self) -> None:
        """Raises ValueError if a list does not have an item for each table."""
        tables = len(self.configuration.tables)
        if not len(self.lookups) == len(self.unique_rows) == len(self.reuse_factors) == tables:
            raise ValueError(
                f"lookups, unique_rows and reuse_factors need an item for each of {tables} tables"
            )


class _TimedLookup(_Entry):
    visit: Whole
    index: Whole
    forward_us: Times
    backward_us: Times
    by_exchange_us: Times | msgspec.UnsetType = msgspec.UNSET


class LookupEntry(_TimedLookup, tag="lookup"):
    """The times of a lookup."""


class RetestEntry(_TimedLookup, tag="retest"):
    """The times of a lookup that was measured again."""


class MeasuredMessage(Record):
    """The times of a `Message`; see `measure_collectives`. Older ones lack times on cores."""

    operation: Literal["all_to_all", "all_reduce"]
    role: Literal["grid", "between", "uneven"]
    bytes: Annotated[list[list[Whole]], msgspec.Meta(min_length=1)]
    backend: str
    world_size: Ranks
    us: Times
    cpu_us: tuple[Amount, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for bytes that no message of the operation has."""
        columns = len(self.bytes) if self.operation == "all_to_all" else 1
        if any(len(row) != columns for row in self.bytes) or not any(map(any, self.bytes)):
            raise ValueError(f"bytes of an {self.operation} are not by source and destination")


class CollectivesEntry(_Entry, tag="collectives"):
    """The times of all messages of a backend among some ranks."""

    backend: str
    world_size: Ranks
    visit: Whole
    messages: list[MeasuredMessage]

    @property
    def measured(self) -> list[tuple[Any, ...]]:
        """Returns what was measured, the same in all visits."""
        return [(each.operation, each.role, each.bytes) for each in self.messages]


class StepsEntry(_Entry, tag="steps"):
    """The times of steps by plan; see `measure_steps`."""

    world_size: Ranks
    index: Whole
    model: StepModel
    backend: Literal["gloo", "bls"]
    training: bool
    us: dict[Plan, Times]

    def __post_init__(self) -> None:
        """Raises ValueError for more ids than can be counted."""
        ids = self.world_size * self.model.batch * sum(t.pooling for *_, t in self.model.tables)
        if ids > _MOST_IDS:
            raise ValueError(f"a step of {ids:.3g} ids is larger than any that is measured")


class DenseEntry(_Entry, tag="dense"):
    """The times of a dense op, in files of 0.2.0. Nothing reads them."""

    visit: Whole
    index: Whole
    op: Any
    times: Any = None


Entry = (
    MemoryEntry
    | WorkloadEntry
    | LookupEntry
    | RetestEntry
    | DenseEntry
    | CollectivesEntry
    | StepsEntry
)


def check_together(entries: Iterable[tuple[str, Entry]]) -> None:
    """Checks that measurements name only what stands before them.

    Args:
        entries: each with its place, for the error.

    Raises:
        ValueError: one does not; the text has its place.
    """
    described: set[int] = set()
    measured: set[int] = set()
    messages: dict[tuple[str, int], list[tuple[Any, ...]]] = {}
    for where, entry in entries:
        if isinstance(entry, WorkloadEntry):
            described.add(entry.index)
        elif isinstance(entry, LookupEntry):
            if entry.index not in described:
                raise ValueError(f"{where}: index: no workload {entry.index} stands before it")
            measured.add(entry.index)
        elif isinstance(entry, RetestEntry):
            if entry.index not in measured:
                raise ValueError(f"{where}: index: no lookup {entry.index} stands before it")
        elif isinstance(entry, CollectivesEntry):
            key = entry.backend, entry.world_size
            if messages.setdefault(key, entry.measured) != entry.measured:
                raise ValueError(f"{where}: messages: the visit before measured others")

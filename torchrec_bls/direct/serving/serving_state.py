"""What a process serves, for monitoring."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Standing(NamedTuple):
    """Where a process stands with the versions of its tables.

    Attributes:
        is_behind: whether a newer version was announced than that of the last batch.
        drained_for: see `ServingState`.
    """

    is_behind: bool
    drained_for: str


@dataclass(frozen=True)
class ServingState:
    """The tables that a process reads directly, and the processes that publish them.

    Attributes:
        rank: rank whose tables this process publishes; None where it only reads, as a forked child
            does.
        version: version of the weights of the last batch; or, if the tables were drained since, of
            those that the next one sees.
        serial: how many versions have served up to that one.
        published: time when the last owner had made its tables of that version, in seconds as
            `time.time()` has it. None for what the ranks had loaded before their first forward:
            nobody has published that.
        age: seconds since then, or None.
        trained: when a training had the weights of that version, in seconds as `time.time()` has it
            on the training's hosts: of a delta, when `DeltaWriter.write` was called; of a
            checkpoint, when its last file was written. None if that is unknown.
        publish_seconds: seconds that the slowest owner took to make its tables, or None.
        bytes_written: bytes of the version's tables that all owners have written, or None.
        bytes_reused: bytes of its tables that are those of an earlier version, or None.
        announced: the last version that all owners have announced.
        announced_serial: how many versions have served up to that one. If it stays above `serial`
            while there are batches, `problem` says why.
        pending: versions that owners have announced and that do not serve yet, by owner.
        missing: owners without a pending version, while others have one.
        owners: number of ranks that have tables.
        owners_gone: ranks whose tables are served although no living process publishes for them.
        readers: process numbers of the living processes that read these tables: ranks, processes
            that have attached, and forked children, this one among them. A process counts from its
            first call of `publish`, `offer`, `serving_state` or `attach` on, and a child from its
            first batch.
        readers_behind: readers that have an older version than the announced one in memory: the
            serial number of the oldest one, by process number. Its memory is freed when none does.
        uncounted: whether this process is not among `readers`, because 256 others are or because
            it has no descriptor left.
        failed_publishes: calls of `publish` that have raised in this process.
        drained_for: version for whose making the tables are drained, so that forwards raise
            DrainedError: this process is not ready for requests. Empty if they are not.
        problem: why this process does not read what the ranks publish, or why the parameters show
            an older version than is served; empty if there is none.
        rows_read: rows that batches of this process have read of the shards of each rank. Those of
            quantized tables are not counted.
        refused_batches: number of batches that did not fit a module (an id out of range, a wrong
            key), summed over modules.
        replaced_ids: number of ids for which row 0 was looked up, with bad_ids="row0".
        small_page_bytes: bytes of the tables of `version` that asked for pages of 2 MiB and have
            small ones, since the kernel had none when they were published. Lookups in them are
            slower, and page tables larger. `torchrec-bls doctor` says what the host gives.
    """

    rank: int | None
    version: str
    serial: int
    published: float | None
    age: float | None = field(compare=False)
    trained: float | None
    publish_seconds: float | None
    bytes_written: int | None
    bytes_reused: int | None
    announced: str
    announced_serial: int
    pending: Mapping[int, str]
    missing: tuple[int, ...]
    owners: int
    owners_gone: tuple[int, ...]
    readers: tuple[int, ...]
    readers_behind: Mapping[int, int]
    uncounted: bool
    failed_publishes: int
    drained_for: str
    problem: str
    rows_read: tuple[int, ...]
    refused_batches: int
    replaced_ids: int
    small_page_bytes: int

"""What a process serves, for monitoring."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServingState:
    """The tables that a process reads directly, and the processes that publish them.

    Attributes:
        rank: rank whose tables this process publishes; None where it only reads.
        generation: number of the weights of the last batch, counted from 1.
        announced: the last generation that all owners have announced. If it stays above
            `generation` while there are batches, `problem` says why.
        owners: number of ranks that have tables.
        owners_gone: ranks whose tables are served although no living process publishes for them.
        readers: process numbers of the living processes that attached to this one.
        problem: why an announced generation could not be mapped or taken, or why the parameters
            show an older one than is served; empty if there is none.
        rows_read: rows that batches of this process have read of the shards of each rank.
        refused_batches: number of batches that did not fit a module (an id out of range, a wrong
            key), summed over modules.
        replaced_ids: number of ids for which row 0 was looked up, with bad_ids="row0".
    """

    rank: int | None
    generation: int
    announced: int
    owners: int
    owners_gone: tuple[int, ...]
    readers: tuple[int, ...]
    problem: str
    rows_read: tuple[int, ...]
    refused_batches: int
    replaced_ids: int

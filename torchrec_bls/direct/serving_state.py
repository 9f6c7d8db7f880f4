"""What a process serves, for who watches it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServingState:
    """The tables that a process reads directly, and who stands behind them.

    Attributes:
        rank: whose tables this process publishes; None where it reads alone.
        generation: of the weights that the last batch was of, counted from 1.
        announced: the last generation that all owners have announced. If it stays above
            `generation` while there are batches, `problem` says why.
        owners: number of ranks that have tables.
        owners_gone: ranks whose tables are served though no living process publishes for them.
        readers: numbers of the living processes that attached to this one.
        problem: why an announced generation could not be mapped; empty if there is none.
        rows_read: rows that batches of this process have read of the shards of each rank.
        refused_batches: batches of each module that did not fit it: an id out of range, a wrong
            key. Added up.
        replaced_ids: ids that row 0 was looked up for, with bad_ids="row0".
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

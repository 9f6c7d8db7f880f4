"""The message of a rank to all others along with the ids of a batch."""

from typing import NamedTuple


class IdsNote(NamedTuple):
    """The message of a rank to all others along with the ids of a batch.

    Attributes:
        ended: whether the rank has no batches any more.
        refusal: reason why no rank may go on with this batch; None if there is none.
        updates: number of updates of the weights that it has ready, counted from the start.
    """

    ended: bool = False
    refusal: str | None = None
    updates: int = 0


NO_NOTE = IdsNote()

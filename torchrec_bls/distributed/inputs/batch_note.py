"""What a rank tells all others along with the ids of a batch."""

from typing import NamedTuple


class IdsNote(NamedTuple):
    """What a rank tells all others along with the ids of a batch.

    Attributes:
        ended: it has no batch any more.
        refusal: why no rank may go on with this batch; None: nothing keeps them from it.
        updates: of the weights that it has ready, counted from the start.
    """

    ended: bool = False
    refusal: str | None = None
    updates: int = 0

"""What the supervisor tells workers, which they can't see themselves."""

from dataclasses import dataclass

import msgspec

#: Causes of a worker's begin that are the ends of others.
LOSSES = DEATH, STALL = "death", "stall"


@dataclass(frozen=True)
class Refreshes:
    """What became of new checkpoints.

    Attributes:
        failed: how many publications have failed.
        problem: why the newest checkpoint is not served; empty if it is.
    """

    failed: int = 0
    problem: str = ""


class Status(msgspec.Struct, tag=True):
    """To a worker: what it can't see itself.

    Attributes:
        refreshes: what became of new checkpoints.
        workers: how many workers there are to be.
        ready: how many answer requests.
        starts: how many workers have begun, by cause: "start", "renewal" or one of LOSSES.
        is_leaving: whether the service is about to end.
    """

    refreshes: Refreshes
    workers: int
    ready: int
    starts: dict[str, int]
    is_leaving: bool = False

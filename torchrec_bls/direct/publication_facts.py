"""What is known about the publication of a version."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class PublicationFacts:
    """The publication of a version, or an owner's part of it.

    Attributes:
        published: time when it was announced, in seconds as `time.time()` has it.
        seconds: seconds from the call of `publish` until then.
        bytes_written: bytes of the tables that were written.
        bytes_reused: bytes of the tables that are those of the version before, and were not.
    """

    published: float
    seconds: float
    bytes_written: int
    bytes_reused: int

    @classmethod
    def of_all(cls, parts: Iterable["PublicationFacts"]) -> "PublicationFacts | None":
        """Returns the facts of a version from those of its parts; None if there are none. Owners
        publish at the same time, and a version serves when the last one has announced it."""
        parts = list(parts)
        if not parts:
            return None
        return cls(
            max(part.published for part in parts),
            max(part.seconds for part in parts),
            sum(part.bytes_written for part in parts),
            sum(part.bytes_reused for part in parts),
        )

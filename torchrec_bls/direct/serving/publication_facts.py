"""What is known about the publication of a version."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_bls.direct.generation import Generation


@dataclass(frozen=True)
class PublicationFacts:
    """The publication of a version by all owners.

    Attributes:
        published: time when the last owner had made its tables, just before it announced them, in
            seconds as `time.time()` has it.
        seconds: seconds that the slowest owner took to make its tables.
        bytes_written: bytes of tables that were written.
        bytes_reused: bytes of tables that are those of an earlier version.
        trained: when a training had the oldest of these weights, see Facts. None: that is unknown.
    """

    published: float
    seconds: float
    bytes_written: int
    bytes_reused: int
    trained: float | None

    @classmethod
    def of(cls, generations: Sequence[Generation]) -> "PublicationFacts":
        """Returns the facts of a version from its generation of each module. An owner makes its
        parts of the modules one after the other, at the same time as the other owners."""
        parts = [part for generation in generations for part in generation.parts]
        by_owner = zip(*(generation.parts for generation in generations), strict=True)
        trained = [part.facts.trained for part in parts]
        known = [each for each in trained if each is not None]
        return cls(
            max(part.facts.published for part in parts),
            max(sum(part.facts.seconds for part in of_owner) for of_owner in by_owner),
            sum(part.facts.bytes_written for part in parts),
            sum(part.facts.bytes_reused for part in parts),
            min(known) if len(known) == len(trained) else None,
        )

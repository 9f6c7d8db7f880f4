"""The collectives that a calibration measures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

#: One float32: what the messages are made of.
WORD_BYTES = 4
LEAST_BYTES = 64
MOST_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Message:
    """One collective's sizes.

    Attributes:
        operation: "all_to_all" or "all_reduce".
        role: "grid" (sizes that double), "between" (drawn sizes, the same for all ranks) or
            "uneven" (drawn for each pair of ranks).
        bytes: bytes by [source][destination]; of an all-reduce, [[bytes of each rank]].
    """

    operation: str
    role: str
    bytes: tuple[tuple[int, ...], ...]

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)

    def totals(self) -> tuple[list[int], list[int]]:
        """Returns what each rank sends and what it receives, itself included."""
        return [sum(row) for row in self.bytes], [sum(row) for row in zip(*self.bytes, strict=True)]

    def largest_rank_bytes(self) -> int:
        """Returns the bytes of the rank that sends or receives most."""
        sent, received = self.totals()
        return max(*sent, *received)


def messages(
    world_size: int, *, seed: int, memory_bytes: int, between: int, uneven: int
) -> list[Message]:
    """Returns the messages for one backend and world size.

    Args:
        world_size: number of ranks.
        seed: seed, not negative.
        memory_bytes: bytes that the buffers of all ranks may take.
        between: number of drawn sizes of each operation.
        uneven: number of uneven all-to-alls.
    """
    most = min(MOST_BYTES, memory_bytes // (4 * world_size))
    random = np.random.default_rng([seed, world_size])
    doubled = [2**i for i in range(int(np.log2(LEAST_BYTES)), int(np.log2(most)) + 1)]
    drawn = [int(size) for size in _log_uniform(random, between, most)]
    result = []
    for role, sizes in (("grid", doubled), ("between", drawn)):
        for size in sizes:
            part = max(size // world_size // WORD_BYTES, 1) * WORD_BYTES
            even = tuple((part,) * world_size for _ in range(world_size))
            result.append(Message("all_to_all", role, even))
            result.append(Message("all_reduce", role, ((size // WORD_BYTES * WORD_BYTES,),)))
    for i, size in enumerate(_log_uniform(random, uneven, most / 2)):
        # Ranks with more tables send more to everybody, and receive more ids from everybody.
        rank = random.uniform(0.1, 2.0, size=(world_size, 1))
        pair = random.uniform(0.9, 1.1, size=(world_size, world_size))
        words = np.maximum(size / world_size * rank * pair / WORD_BYTES, 1).astype(int)
        words = words.T if i % 2 else words
        pairs = tuple(tuple(int(word) * WORD_BYTES for word in row) for row in words)
        result.append(Message("all_to_all", "uneven", pairs))
    return result


def _log_uniform(random: np.random.Generator, count: int, most: float) -> Any:
    return np.exp(random.uniform(np.log(LEAST_BYTES), np.log(most), size=count))

"""The messages of the soak: sizes and bytes that sender and receiver compute by themselves."""

import struct

import numpy as np

LARGEST = 480
OVERSIZED = 6000
# One message in so many is larger than a slot.
_OVERSIZED_EVERY = 4001
_TABLE = 1 << 16
_STAMP = struct.Struct("<QHHI")


class Messages:
    """What rank s sends to rank d in each iteration.

    Sizes are uniform up to `LARGEST` bytes, few are just below `OVERSIZED`. A stamp of iteration,
    source, destination and size comes first, then a stretch of random bytes that begins elsewhere
    in each message, so that no message looks like another.
    """

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._bytes = random.bytes(_TABLE + OVERSIZED)
        self._sizes = random.integers(0, LARGEST - _STAMP.size + 1, _TABLE).tolist()

    def between(self, iteration: int, source: int, destination: int) -> bytes:
        """The message of `source` to `destination`; iterations count on over the runs."""
        mixed = (iteration << 16 ^ source << 8 ^ destination) * 0x9E3779B97F4A7C15
        size = self._sizes[(mixed >> 40) % _TABLE]
        if (mixed >> 20) % _OVERSIZED_EVERY == 0:
            size = OVERSIZED - _STAMP.size - size
        start = (mixed >> 30) % _TABLE
        stamp = _STAMP.pack(iteration, source, destination, size)
        return stamp + self._bytes[start : start + size]

"""The ratio and speeds of each stage on a table's rows, measured on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Protocol, TypeVar

import numpy as np

from torchrec_bls.analysis.frames import Frame
from torchrec_bls.analysis.samples import Lookup, SampledTable
from torchrec_bls.codecs.compression import Compression, Measured

TURNS = 9
# Larger than the caches of one core: a step has other work between two uses of memory. The memory
# is not zeros, which may all be one page.
_BETWEEN = np.ones(1 << 20)
_LEAST_SECONDS = 1e-9  # where the clock saw no time pass

Key = TypeVar("Key")


class Coded(Protocol):
    """Something that can be encoded and decoded again and again."""

    def encode(self) -> None:
        """Encodes."""

    def decode(self) -> None:
        """Decodes what `encode` wrote."""


def measure(
    table: SampledTable, batches: Sequence[Sequence[Lookup]], bound: float
) -> dict[Compression, Measured]:
    """Returns ratio and speeds of all stages that the table may have.

    Rows are encoded as a rank sends the rows of one batch to another rank: by one thread, in a
    frame of their own. They are decoded as they are received, from memory that is in no cache of a
    single core. Finding equal rows is part of both. A time is the median of several turns. In each
    turn the stages come one after the other.

    Args:
        table: table that rows were looked up in. If its ids have weights, rows of equal ids may
            differ, so that `Compression.UNIQUE` is left out.
        batches: lookups by [batch][feature].
        bound: bound of the error.

    Raises:
        ValueError: no batch has a row.
    """
    stages = [each for each in Compression if not (table.weighted and each is Compression.UNIQUE)]
    total = {each: _Total() for each in stages}
    raw = 0
    for lookups in batches:
        bytes_of_batch = sum(lookup.rows.nbytes for lookup in lookups)
        if bytes_of_batch == 0:
            continue
        raw += bytes_of_batch
        frames = {
            each: Frame(lookups, each, bound, pooled=table.pooled, weighted=table.weighted)
            for each in stages
        }
        for each, (encoding, decoding) in seconds_of(frames).items():
            total[each].add(frames[each].bytes, encoding, decoding)
    if raw == 0:
        raise ValueError(f"no batch looks anything up in table '{table.name}'")
    return {each: total[each].measured(raw) for each in stages}


class _Total:
    """Sums over the frames of all batches: bytes and seconds."""

    def __init__(self) -> None:
        self._bytes, self._encoding, self._decoding = 0, 0.0, 0.0

    def add(self, frame_bytes: int, encoding: float, decoding: float) -> None:
        self._bytes += frame_bytes
        self._encoding += encoding
        self._decoding += decoding

    def measured(self, raw: int) -> Measured:
        return Measured(
            ratio=raw / self._bytes,
            encode=raw / self._encoding,
            decode=raw / self._decoding,
        )


def seconds_of(frames: Mapping[Key, Coded]) -> dict[Key, tuple[float, float]]:
    """Returns the median seconds of frames to encode and to decode. The frames take turns, from
    memory that is in no cache of a single core."""
    encoding: dict[Key, list[float]] = {each: [] for each in frames}
    decoding: dict[Key, list[float]] = {each: [] for each in frames}
    for turn in range(TURNS + 1):
        for each, frame in frames.items():
            times = _seconds(frame.encode), _seconds(frame.decode)
            if turn > 0:  # the first one warms up
                encoding[each].append(times[0])
                decoding[each].append(times[1])
    return {
        each: (
            max(median(encoding[each]), _LEAST_SECONDS),
            max(median(decoding[each]), _LEAST_SECONDS),
        )
        for each in frames
    }


def _seconds(action: Callable[[], None]) -> float:
    _BETWEEN.sum()
    start = perf_counter()
    action()
    return perf_counter() - start

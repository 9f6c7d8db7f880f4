"""The choice of a table's stages of compression, by equation 2 of Dual-Level Adaptive Lossy
Compression: the fewest seconds for a byte, with the time of encoding and decoding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

# Two measurements of the same stages may differ by this factor.
_NEARLY = 1.05


class Compression(Enum):
    """The processing of rows before they are sent. The values are their names in files."""

    AS_THEY_ARE = "as they are"
    UNIQUE = "unique"  # rows of equal ids travel once, and no value changes
    FIXED = "unique, fixed width"  # rounded within the bound, all codes of as many bits
    HUFFMAN = "unique, Huffman"  # rounded within the bound, frequent codes of fewer bits

    @property
    def bounded(self) -> bool:
        """Returns whether values are rounded."""
        return self in (Compression.FIXED, Compression.HUFFMAN)

    @property
    def unique(self) -> bool:
        """Returns whether rows of equal ids travel once."""
        return self is not Compression.AS_THEY_ARE


@dataclass(frozen=True)
class Measured:
    """Measurements of stages on a table's rows.

    Attributes:
        ratio: ratio of the rows' bytes as float32 to the bytes that travel.
        encode: bytes of the rows as float32 that one thread encodes in a second.
        decode: bytes of the rows as float32 that one thread decodes in a second.
    """

    ratio: float
    encode: float
    decode: float

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that are not positive."""
        for name, value in (
            ("ratio", self.ratio),
            ("encode", self.encode),
            ("decode", self.decode),
        ):
            if not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise ValueError(f"{name} is {value!r}, but must be a positive number")

    def seconds_per_byte(self, link: float, ranks_per_core: float = 1.0) -> float:
        """Returns the seconds for a byte of float32 from one rank to another.

        The speed-up of the exchange in equation 2 is 1 / (this * the link's bytes per second). Its
        ranks have a processor each. Ranks that share a core encode more slowly.

        Args:
            link: bytes per second.
            ranks_per_core: number of ranks that share a core, at least 1.
        """
        return 1 / (self.ratio * link) + ranks_per_core * (1 / self.encode + 1 / self.decode)


def speed_up(
    stages: Compression, measured: Measured, link: float, ranks_per_core: float = 1.0
) -> float:
    """Returns how many times as fast as float32 rows travel, by equation 2.

    Rows without a codec go straight from the tables into messages.

    Args:
        stages: stages that the rows go through.
        measured: measurements of these stages.
        link: bytes per second from one rank to the others.
        ranks_per_core: number of ranks that share a core, at least 1.
    """
    if stages is Compression.AS_THEY_ARE:
        return 1.0
    return 1 / (link * measured.seconds_per_byte(link, ranks_per_core))


def ranked(
    measured: Mapping[Compression, Measured], link: float, ranks_per_core: float = 1.0
) -> list[Compression]:
    """Returns the measured stages, the fastest first.

    The first one is the simplest of those that are nearly as fast as the fastest. Measurements
    differ by more than that, and a simpler stage has less to go wrong.

    Args:
        measured: measurements on rows of the table.
        link: bytes per second from one rank to the others.
        ranks_per_core: number of ranks that share a core, at least 1.

    Raises:
        ValueError: `link` is not a positive number, or `ranks_per_core` is below 1.
    """
    if not (isinstance(link, (int, float)) and 0 < link < math.inf):
        raise ValueError(f"the link has {link!r} bytes per second, but must have a positive number")
    if not (isinstance(ranks_per_core, (int, float)) and 1 <= ranks_per_core < math.inf):
        raise ValueError(
            f"ranks_per_core is {ranks_per_core!r}, but must be a number of at least 1"
        )
    times = {
        stages: speed_up(stages, measured[stages], link, ranks_per_core)
        for stages in Compression  # from the simplest on
        if stages in measured
    }
    enough = max(times.values(), default=0.0) / _NEARLY
    simplest = [stages for stages in times if times[stages] >= enough][:1]
    others = [stages for stages in times if stages not in simplest]
    return simplest + sorted(others, key=lambda stages: -times[stages])


def chosen(
    tables: Mapping[str, Mapping[Compression, Measured]], link: float, ranks_per_core: float = 1.0
) -> dict[str, Compression]:
    """Returns the stages of tables whose rows share messages.

    Rows go straight from the tables into messages only where no table of a message is encoded. So
    the fastest stages of each table are taken only if all tables together are clearly faster by
    them than as they are. A byte of each table counts as much as one of another.

    Args:
        tables: measurements on the rows of each table, by name.
        link: bytes per second from one rank to the others.
        ranks_per_core: number of ranks that share a core, at least 1.

    Raises:
        ValueError: as `ranked` does.
    """
    fastest = {name: ranked(measured, link, ranks_per_core)[0] for name, measured in tables.items()}
    encoded = sum(
        tables[name][stages].seconds_per_byte(link, ranks_per_core)
        for name, stages in fastest.items()
    )
    if encoded * _NEARLY > len(tables) / link:
        return dict.fromkeys(tables, Compression.AS_THEY_ARE)
    return fastest

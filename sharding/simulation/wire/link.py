"""The link of each host, which its ranks share, and the time of messages on it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_BYTES_PER_US = {"kbit": 1e3 / 8e6, "mbit": 1e6 / 8e6, "gbit": 1e9 / 8e6}


@dataclass(frozen=True)
class Link:
    """A link from each host to all others, equally fast in both directions.

    Attributes:
        bytes_per_us: bytes that a host can send in a microsecond; it can receive as many meanwhile.
        host: (ranks,), the host of each rank.
        within: whether ranks of one host also use its link, since they share no memory.
    """

    bytes_per_us: float
    host: tuple[int, ...]
    within: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a link that no bytes can pass."""
        if not 0 < self.bytes_per_us < math.inf:
            raise ValueError(
                f"a link of {self.bytes_per_us} bytes in a microsecond: must be a positive number"
            )

    @classmethod
    def of_hosts(cls, bytes_per_us: float, ranks: int, per_host: int) -> Link:
        """Returns the link of ranks that fill one host after the other. If there is only one host,
        its ranks use the link for their own messages: there are no others."""
        hosts = tuple(rank // per_host for rank in range(ranks))
        return cls(bytes_per_us, hosts, within=ranks <= per_host)

    def transfer_us(self, sent: npt.ArrayLike) -> Floats:
        """Returns (ranks,), the time of each rank's messages on a link that nobody else uses.

        If a host receives more than it sends, its ranks take even shares of the difference. So the
        times of a host's ranks add up to the longer of its two directions.

        Args:
            sent: (ranks, ranks), bytes from each rank to each other one and to itself.
        """
        host = np.array(self.host)
        passes = host[:, None] != host[None, :]
        if self.within:
            passes |= ~np.eye(len(host), dtype=bool)
        passing = np.where(passes, np.asarray(sent, float), 0.0)
        out, back = passing.sum(axis=1), passing.sum(axis=0)
        sends, receives = np.bincount(host, out), np.bincount(host, back)
        more = np.maximum(receives - sends, 0.0) / np.bincount(host)
        transfer: Floats = (out + more[host]) / self.bytes_per_us
        return transfer


def read_link(text: str) -> float:
    """Reads a rate in tc's notation, such as 1gbit or 100mbit. Returns bytes per microsecond.

    Raises:
        ValueError: the text is no rate, or the rate is not positive.
    """
    found = re.fullmatch(r"(.+?)(kbit|mbit|gbit)", text.strip().lower())
    try:
        rate = float(found[1]) if found else math.nan
    except ValueError:
        rate = math.nan
    if found is None or not 0 < rate < math.inf:
        raise ValueError(
            f"link '{text}' is no positive rate: give one with its unit, like 1gbit or 100mbit "
            f"({', '.join(_BYTES_PER_US)})"
        )
    return rate * _BYTES_PER_US[found[2]]

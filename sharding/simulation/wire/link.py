"""The link of each host, which its ranks share, and the time of messages on it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Bytes on an Ethernet link for each byte of a message over TCP: 1448 of them have 66 of headers.
TCP_BYTES = 1514 / 1448

_BYTES_PER_US = {"kbit": 1e3 / 8e6, "mbit": 1e6 / 8e6, "gbit": 1e9 / 8e6}
_BYTES = {"b": 1, "kb": 2**10, "mb": 2**20}


@dataclass(frozen=True)
class Link:
    """A link from each host to all others, equally fast in both directions. Messages go over TCP.

    Attributes:
        bytes_per_us: bytes that a host can send in a microsecond; it can receive as many meanwhile.
        host: (ranks,), the host of each rank.
        within: whether ranks of one host also use its link, since they share no memory.
        burst_bytes: bytes of a host that pass at once after a pause, as a token bucket lets them.
    """

    bytes_per_us: float
    host: tuple[int, ...]
    within: bool = False
    burst_bytes: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for a link that no bytes can pass, or with an impossible burst."""
        if not 0 < self.bytes_per_us < math.inf:
            raise ValueError(
                f"a link of {self.bytes_per_us} bytes in a microsecond: must be a positive number"
            )
        if not 0 <= self.burst_bytes < math.inf:
            raise ValueError(f"a link's burst of {self.burst_bytes} bytes: must not be negative")

    @classmethod
    def of_hosts(
        cls, bytes_per_us: float, ranks: int, per_host: int, burst_bytes: float = 0.0
    ) -> Link:
        """Returns the link of ranks that fill one host after the other. If there is only one host,
        its ranks use the link for their own messages: there are no others."""
        hosts = tuple(rank // per_host for rank in range(ranks))
        return cls(bytes_per_us, hosts, ranks <= per_host, burst_bytes)

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

    def burst_us(self, transfer: Floats) -> Floats:
        """Returns (ranks,), by how much each rank's messages may be early after a pause.

        A host's burst is shared by its ranks in proportion to their `transfer_us`. For ranks that
        send nothing it is infinite.
        """
        host = np.array(self.host)
        sends = transfer > 0
        burst = np.full(len(host), math.inf)
        of_host = np.bincount(host, transfer)[host][sends]
        burst[sends] = self.burst_bytes / self.bytes_per_us * transfer[sends] / of_host
        return burst


def read_link(text: str) -> tuple[float, float]:
    """Reads a rate and, if there is one, a burst, in tc's notation: 100mbit, 1gbit burst 256kb.

    Returns:
        Bytes per microsecond, and bytes that pass at once.

    Raises:
        ValueError: the text is no rate, or a number is not positive.
    """
    of_burst = r"(?: +burst +(\S+?)(b|kb|mb))?"
    found = re.fullmatch(r"(\S+?)(kbit|mbit|gbit)" + of_burst, text.strip().lower())
    rate = _number(found[1]) if found else math.nan
    burst = _number(found[3] or "1") if found else math.nan
    if found is None or not (0 < rate < math.inf and 0 < burst < math.inf):
        raise ValueError(
            f"link '{text}' is no positive rate: give one with its unit, like 1gbit or 100mbit "
            f"({', '.join(_BYTES_PER_US)}), and a burst if it has one, like 1gbit burst 256kb "
            f"({', '.join(_BYTES)})"
        )
    return rate * _BYTES_PER_US[found[2]], burst * _BYTES[found[4]] if found[3] else 0.0


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan

"""Figures of records as sentences have them."""

from collections.abc import Iterator
from typing import Any

Records = dict[str, Any]
Sentences = Iterator[str]

NUMBERS = (
    *("no", "one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "eleven", "twelve"),
)
KIB, MIB = 2**10, 2**20

#: Number of ranks, bytes per pair, and mode.
Cell = tuple[int, int, str]


def range_of(values: Any, form: str = ".1f", to: str = " to ") -> str:
    """The least and the greatest, or both as one if they look the same."""
    low, high = (format(each, form) for each in (min(values), max(values)))
    return low if low == high else f"{low}{to}{high}"


def alltoall_us(records: Records) -> dict[Cell, dict[str, float]]:
    return {
        (each["ranks"], each["bytes_per_pair"], each["mode"]): {
            name: peer["us_per_call"]["median"] for name, peer in each["peers"].items()
        }
        for each in records["alltoall"]["results"]
    }


def backend_us(records: Records) -> dict[Cell, dict[str, float]]:
    return {
        (each["ranks"], each["size"], each["mode"]): {
            name: each[name]["median"] for name in ("bls", "gloo")
        }
        for each in records["backend"]["results"]["alltoall"]
    }


def single_gloo_ms(cells: dict[Cell, dict[str, float]], ranks: int) -> list[float]:
    """Milliseconds of gloo's single calls: with 2 ranks all, with more up to 256 KiB."""
    return [
        us["gloo"] / 1e3
        for (of, size, mode), us in cells.items()
        if of == ranks and mode == "one_shot" and (ranks == 2 or size <= 256 * KIB)
    ]

"""The soak's own parts: messages that differ, resources whose growth is told."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.soak.soak import LARGEST, OVERSIZED, message, problems

FLAT = {"private_kib": 250_000, "shared_kib": 4, "descriptors": 19}


def results(**changes: dict[str, int]) -> dict[str, Any]:
    none = dict.fromkeys(FLAT, 0)
    flat = {"first": FLAT, "last": FLAT, "largest_growth_within_run": none}
    return {"ranks": [flat, {name: flat[name] | changes.get(name, {}) for name in flat}]}


def test_messages_differ_and_stay_within_their_sizes() -> None:
    seen = {
        message(1, iteration, source, destination)
        for iteration in range(2000)
        for source in range(3)
        for destination in range(3)
    }
    assert len(seen) == 2000 * 9
    sizes = set(map(len, seen))
    assert min(sizes) >= 16
    assert max(size for size in sizes if size <= LARGEST) > LARGEST - 10
    assert LARGEST < max(sizes) <= OVERSIZED


def test_what_stays_is_no_problem() -> None:
    assert problems(results(last={"private_kib": 250_900})) == []


@pytest.mark.parametrize(
    ("part", "name", "value", "text"),
    [
        ("last", "descriptors", 20, "rank 1: descriptors grew from 19 to 20 over the runs"),
        ("last", "shared_kib", 8, "rank 1: shared_kib grew from 4 to 8 over the runs"),
        ("last", "private_kib", 253_000, "rank 1: private_kib grew from 250000 to 253000"),
        ("largest_growth_within_run", "descriptors", 9, "rank 1: descriptors grew by 9 while"),
    ],
)
def test_growth_is_told(part: str, name: str, value: int, text: str) -> None:
    (problem,) = problems(results(**{part: {name: value}}))
    assert problem.startswith(text)

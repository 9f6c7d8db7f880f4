"""What is checked with which model, and what must come out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Instance(NamedTuple):
    """A model with its constants, and what Spin must say about it."""

    model: str
    name: str
    claim: str
    defines: dict[str, int | str]
    finds: str | None = None
    """The last step of the counterexample, a regular expression; None: there must not be one."""
    deadlocks_count: bool = True
    slow: bool = False
    """Left out in CI."""


OVERWRITES = r"rank \d overwrites message \d+ to rank \d, which is not released"
RANKS_AND_BOUNDS = [(2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2)]


def slots() -> Iterator[Instance]:
    """How many slots a pair of ranks needs, with and without credits."""

    def instance(
        ranks: int,
        bound: int,
        slots: int,
        claim: str,
        finds: str | None = None,
        deadlocks_count: bool = True,
        **followed: int,
    ) -> Instance:
        defines = {"WORDS": 0, "HEADERS": 0, "PULLS": 0, **followed}
        credits = "credit words" if defines["WORDS"] else "no credits"
        name = f"{ranks} ranks, k = {bound}, S = {slots}, {credits}"
        if defines["HEADERS"]:
            name += ", credits in headers"
        if defines["PULLS"]:
            name += ", oversized messages"
        if "WATCHED" in defines and ranks > 2:
            name += f" to rank {defines['WATCHED']}"
        defines.update(RANKS=ranks, BOUND=bound, SLOTS=slots)
        slow = (ranks, bound) == (3, 2) and finds is None
        return Instance("channel", name, claim, dict(defines), finds, deadlocks_count, slow)

    for ranks, bound in RANKS_AND_BOUNDS:
        enough = 2 * (bound + 1)
        yield instance(ranks, bound, enough, "holds")
        yield instance(ranks, bound, enough - 1, "is overwritten", OVERWRITES)
        for watched in range(1, ranks):
            yield instance(ranks, bound, enough, "never waits", HEADERS=1, WATCHED=watched)
            yield instance(ranks, bound, enough, "holds", PULLS=1, WATCHED=watched)
        for fewer in range(1, enough):
            if fewer > bound:
                yield instance(ranks, bound, fewer, "holds", WORDS=1)
                continue
            waits = r"deadlock"
            yield instance(ranks, bound, fewer, "ends in a deadlock", waits, WORDS=1)
            yield instance(
                ranks, bound, fewer, "overwrites nothing", WORDS=1, deadlocks_count=False
            )
        for fewer in range(bound + 1, enough):
            for watched in range(1, ranks):
                yield instance(
                    ranks, bound, fewer, "holds", WORDS=1, HEADERS=1, PULLS=1, WATCHED=watched
                )


def paper() -> Iterator[Instance]:
    """The scheme of the paper: k buffers, messages counted by tag."""
    overwrites = r"rank \d overwrites batch \d at rank \d, which has not read it, with batch \d"
    reads = r"rank \d completes batch \d and reads (nothing|batch \d) of rank \d"
    for ranks, buffers in [(2, 1), (2, 2), (3, 1), (3, 2)]:
        for look_at, finds in [("puts", overwrites), ("reads", reads)]:
            for under_way in [buffers, buffers + 1]:
                yield Instance(
                    "paper",
                    f"the paper's scheme, {ranks} ranks, k = {buffers}, "
                    f"{under_way} batches under way, {look_at}",
                    "fails",
                    {
                        "RANKS": ranks,
                        "BUFFERS": buffers,
                        "UNDER_WAY": under_way,
                        "LOOK_AT": look_at,
                    },
                    finds,
                )


INSTANCES = [*slots(), *paper()]

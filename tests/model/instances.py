"""What is checked with which model, and what must come out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Instance(NamedTuple):
    """A model with its constants, and what Spin must say about it."""

    model: str
    name: str
    claim: str
    defines: Mapping[str, int | str]
    finds: str | None = None
    """Last step of the counterexample, a regular expression; None: there must not be one."""
    search: str = "states"
    """"states"; "states but deadlocks", which do not count then; or "cycles"."""
    slow: bool = False
    """Left out in CI."""


RULES = {
    "ALL_PEERS": "looking at more than the awaited peer",
    "RECHECK": "looking again",
    "PASS_ON": "passing poison on",
}
ROW_RULES = {
    "CHECK": "the look at the side after the pin",
    "MARK": "the word that the side has no version",
    "AWAIT": "the wait for pins",
    "DIRTY": "the rows of an attempt that failed",
    "IDENTITY": "the look whether who has pinned lives",
    "RESTORE": "the look for forwards that count on a pin which is let go of",
}
MIXED_ROWS = r"a batch of version \d has row \d of version \d in place of \d"
VERSION_RULES = {
    "COMPARE": "comparing what owners have announced",
    "COUNT": "counting withdrawals",
    "RECHECK": "a second look at what serves",
}
FORWARD_RULES = {
    "FOLLOW": "looking for the calls that peers make",
    "ENDS": "waiting for the peers' ends",
    "NUMBERS": "looking at a call's forward",
    "TELL_FIRST": "telling the own end first",
    "AT_ONCE": "answering before the exception goes on",
    "LEFT_OPEN": "ending what an interrupt left open",
    "REFUSE": "refusing after an interrupt",
    "LOOK": "looking whether peers live",
}
MISTAKEN = r"rank \d takes rank \d's call \d of forward \d for another"
AHEAD = r"rank \d has a batch for forward \d"
LATE = r"rank \d looks rows of forward \d up after its end"
WRONG_FORWARDS = {
    "deadlock": "deadlock",
    MISTAKEN: "a message for another call",
    AHEAD: "no samples in a forward that has some",
    LATE: "rows of weights that may have changed",
}
OVERWRITES = r"rank \d overwrites message \d+ to rank \d, which is not released"


def enough_slots(ranks: int, bound: int) -> Iterator[Instance]:
    """2(k + 1) slots need no credit; one less is overwritten without."""
    defines = {"RANKS": ranks, "BOUND": bound, "SLOTS": 2 * (bound + 1), "WORDS": 0}
    large = (ranks, bound) == (3, 2)
    follows = [(1, 0), (0, 1)] if large else [(1, 1)]
    for watched in range(1, ranks):
        for headers, pulls in follows:
            followed = [*["headers"] * headers, *["oversized messages"] * pulls]
            yield Instance(
                "channel",
                f"{ranks} ranks, k = {bound}, S = {2 * bound + 2}, no credit words; followed: "
                f"{' and '.join(followed)} of ranks 0 and {watched}",
                "no overwrite, no wait for a slot",
                {**defines, "HEADERS": headers, "PULLS": pulls, "WATCHED": watched},
                slow=large or (bound > 0 and watched > 1),
            )
    yield Instance(
        "channel",
        f"{ranks} ranks, k = {bound}, S = {2 * bound + 1}, no credits",
        "overwrite",
        {**defines, "SLOTS": 2 * bound + 1, "HEADERS": 0, "PULLS": 0},
        OVERWRITES,
    )


def fewer_slots(ranks: int, bound: int) -> Iterator[Instance]:
    """With credit words no slot is overwritten, and from k + 1 slots on nobody waits for ever."""
    for slots in range(1, 2 * bound + 2):
        name = f"{ranks} ranks, k = {bound}, S = {slots}, credit words"
        defines = {"RANKS": ranks, "BOUND": bound, "SLOTS": slots, "WORDS": 1}
        alone = {**defines, "HEADERS": 0, "PULLS": 0}
        if slots <= bound:
            yield Instance("channel", name, "deadlock", alone, "deadlock")
            yield Instance("channel", name, "no overwrite", alone, search="states but deadlocks")
        elif (ranks, bound) == (3, 2):
            yield Instance("channel", name, "no overwrite, no deadlock", alone, slow=True)
        else:
            for watched in range(1, ranks):
                yield Instance(
                    "channel",
                    f"{name}; followed: headers and oversized messages of ranks 0 and {watched}",
                    "no overwrite, no deadlock",
                    {**defines, "HEADERS": 1, "PULLS": 1, "WATCHED": watched},
                    # The fewest slots that do are the hardest case.
                    slow=bound > 0 and (watched > 1 or (ranks > 2 and slots > bound + 1)),
                )


def paper(ranks: int, buffers: int, under_way: int) -> Iterator[Instance]:
    """The scheme of the paper: k buffers, messages counted by tag."""
    overwrites = r"rank \d overwrites batch \d at rank \d, which has not read it, with batch \d"
    reads = r"rank \d completes batch \d and reads (nothing|batch \d) of rank \d"
    for look_at, claim, finds in [
        ("puts", "overwrite", overwrites),
        ("reads", "wrong data", reads),
    ]:
        yield Instance(
            "paper",
            f"the paper's scheme, {ranks} ranks, k = {buffers}, {under_way} under way",
            claim,
            {"RANKS": ranks, "BUFFERS": buffers, "UNDER_WAY": under_way, "LOOK_AT": look_at},
            finds,
        )


def failures(
    ranks: int,
    bound: int,
    faults: int,
    watched: int = 1,
    search: str = "states",
    slow: bool = False,
    without: str | None = None,
) -> Iterator[Instance]:
    """After a fault every rank ends, none needs its deadline, and none blames another one."""
    rules = dict.fromkeys(RULES, 1)
    name = f"{ranks} ranks, k = {bound}, faults: {faults}"
    if ranks > 2:
        name += f", oversized messages to rank {watched}"
    claim = "all ranks end" if search == "states" else "no run is endless"
    finds = None
    if without is not None:
        rules[without] = 0
        name += f", without {RULES[without]}"
        if without != "ALL_PEERS":
            claim = "false blame"
            finds = r"rank \d fails and blames rank \d, which has done nothing wrong"
    yield Instance(
        "failure",
        name,
        claim,
        {
            "RANKS": ranks,
            "BOUND": bound,
            "ITERATIONS": bound + 2,
            "FAULTS": faults,
            "WATCHED": watched,
            **rules,
        },
        finds,
        search,
        slow,
    )


def versions(
    owners: int,
    publications: int,
    deaths: int = 0,
    agree: bool = False,
    deadlines: bool = True,
    without: str | None = None,
) -> Iterator[Instance]:
    """No batch has two versions, and what all owners publish at last serves."""
    rules = {"COMPARE": 1, "COUNT": 1, "RECHECK": 1}
    name = f"versions, {owners} owners, {publications} publications each, deaths: {deaths}"
    claim = "the last version, which all publish, serves" if agree else "no batch has two versions"
    finds = None
    if agree and not deadlines:
        name += ", no deadline is over"
    if without is not None:
        rules[without] = 0
        name += f", without {VERSION_RULES[without]}"
        claim = "a batch has two versions"
        finds = r"a batch has version \d of owner 0 and version \d of owner \d"
    yield Instance(
        "versions",
        name,
        claim,
        {
            "OWNERS": owners,
            "PUBLICATIONS": publications,
            "VERSIONS": 2,
            "AGREE": int(agree),
            "DEADLINES": int(deadlines),
            "DEATHS": deaths,
            **rules,
        },
        finds,
    )


def rows(
    processes: int = 1,
    threads: int = 1,
    serials: int = 3,
    deadlines: bool = False,
    whole: int = 0,
    deaths: int = 0,
    kills: int = 0,
    slow: bool = False,
    without: str | None = None,
) -> Iterator[Instance]:
    """No batch has rows of two versions, and all versions are announced."""
    rules = dict.fromkeys(ROW_RULES, 1)
    name = f"rows, {processes} processes of {threads} threads, {serials} versions"
    name += f"; deaths of the keeper: {deaths}, of readers: {kills}"
    name += ", deadlines and exceptions" if deadlines else ""
    name += f", whole versions: {whole}" if whole else ""
    claim, finds = "each batch has one version", None
    if without is not None:
        rules[without] = 0
        name += f", without {ROW_RULES[without]}"
        claim, finds = "a batch has two versions", MIXED_ROWS
        if without == "IDENTITY":
            claim, finds = "deadlock", "deadlock"
    yield Instance(
        "rows",
        name,
        claim,
        {
            "PROCESSES": processes,
            "THREADS": threads,
            "SERIALS": serials,
            "DEADLINES": int(deadlines),
            "WHOLE": whole,
            "DEATHS": deaths,
            "KILLS": kills,
            **rules,
        },
        finds,
        slow=slow,
    )


def forwards(
    ranks: int,
    bound: int = 0,
    forwards: int = 2,
    calls: int = 2,
    faults: int = 1,
    interrupts: bool = False,
    deaths: int = 0,
    meet: bool = False,
    slow: bool = False,
    without: str | None = None,
    finds: str | None = None,
) -> Iterator[Instance]:
    """After a forward that ends early, all ranks go on, and no message is taken for another."""
    rules = dict.fromkeys(FORWARD_RULES, 1)
    name = f"{ranks} ranks, k = {bound}, {forwards} forwards of up to {calls} calls"
    name += f"; exceptions{' or interrupts' if interrupts else ''}: {faults}"
    name += f", deaths: {deaths}" if deaths else ""
    name += ", ranks meet between forwards" if meet else ""
    claim = "each message is for its call, all ranks end"
    if without is not None:
        rules[without] = 0
        name += f", without {FORWARD_RULES[without]}"
        claim = WRONG_FORWARDS[str(finds)]
    yield Instance(
        "forwards",
        name,
        claim,
        {
            "RANKS": ranks,
            "BOUND": bound,
            "FORWARDS": forwards,
            "CALLS": calls,
            "FAULTS": faults,
            "INTERRUPTS": int(interrupts),
            "DEATHS": deaths,
            "MEET": int(meet),
            **rules,
        },
        finds,
        slow=slow,
    )


def instances() -> Iterator[Instance]:
    """All of them, what is small first."""
    for ranks, bound in [(2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2)]:
        yield from enough_slots(ranks, bound)
        yield from fewer_slots(ranks, bound)
    for ranks, buffers, under_way in [(2, 1, 1), (2, 2, 2), (2, 2, 3), (3, 1, 1), (3, 2, 2)]:
        yield from paper(ranks, buffers, under_way)
    for bound in range(3):
        yield from failures(2, bound, faults=0)
        yield from failures(2, bound, faults=2, slow=bound > 1)
    yield from failures(3, 1, faults=0)
    yield from failures(3, 0, faults=1, watched=1)
    yield from failures(3, 0, faults=1, watched=2, slow=True)
    yield from failures(3, 0, faults=1, without="ALL_PEERS")
    yield from failures(3, 0, faults=1, without="PASS_ON")
    yield from failures(2, 0, faults=0, without="RECHECK")
    yield from failures(2, 1, faults=2, search="cycles")
    yield from failures(3, 0, faults=1, search="cycles", slow=True)
    yield from failures(3, 0, faults=2, slow=True)
    yield from failures(3, 1, faults=1, slow=True)
    yield from versions(2, 0, deaths=1, agree=True)
    yield from versions(2, 1, agree=True)
    yield from versions(2, 1, agree=True, deadlines=False)
    yield from versions(2, 1, deaths=1)
    yield from versions(2, 2)
    yield from versions(3, 1)
    for rule in VERSION_RULES:
        yield from versions(2, 2, without=rule)
    yield from rows(deadlines=True)
    yield from rows(threads=2, serials=2, kills=1)
    yield from rows(threads=2, kills=1, slow=True)
    yield from rows(processes=2, serials=2)
    yield from rows(serials=2, whole=1, deaths=1)
    yield from rows(processes=2, slow=True)
    yield from rows(processes=2, serials=2, kills=1, slow=True)
    yield from rows(whole=1, deaths=1, slow=True)
    yield from rows(without="CHECK")
    yield from rows(without="MARK")
    yield from rows(without="AWAIT")
    yield from rows(deadlines=True, without="DIRTY")
    yield from rows(kills=1, without="IDENTITY")
    yield from rows(without="RESTORE")
    yield from forwards(2, forwards=3)
    yield from forwards(2, forwards=3, interrupts=True, slow=True)
    yield from forwards(2, bound=1, faults=2, interrupts=True)
    yield from forwards(2, forwards=3, meet=True)
    yield from forwards(2, interrupts=True, deaths=1)
    yield from forwards(3, calls=1, faults=2, interrupts=True)
    yield from forwards(3, forwards=1, bound=1, faults=2)
    yield from forwards(3, calls=1, interrupts=True, deaths=1, slow=True)
    yield from forwards(3, interrupts=True, slow=True)
    yield from forwards(2, without="FOLLOW", finds="deadlock")
    yield from forwards(2, without="ENDS", finds=MISTAKEN)
    yield from forwards(2, without="NUMBERS", finds=AHEAD)
    yield from forwards(2, faults=2, without="TELL_FIRST", finds="deadlock")
    yield from forwards(2, without="AT_ONCE", finds=LATE)
    yield from forwards(2, meet=True, without="AT_ONCE", finds="deadlock")
    yield from forwards(2, interrupts=True, without="LEFT_OPEN", finds=MISTAKEN)
    yield from forwards(2, interrupts=True, without="REFUSE", finds=LATE)
    yield from forwards(2, deaths=1, without="LOOK", finds="deadlock")

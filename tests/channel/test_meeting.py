"""All interleavings of the store operations of two and three ranks that come, give up and fail.

Each rank's try is run again and again from its last look at the store, with the answers that the
store gave before, and goes one operation further each time. So a state is what the store holds and
what each rank knows, and all states are visited, each once.
"""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.tiers import slow_but
from torchrec_bls.collective.transport.meeting import Meeting, OtherRankFailedError

BASE = "base"


@pytest.fixture(scope="module")
def transport() -> None:
    """In the place of the one for the other files: what ranks tell each other is the same."""


class _Further(BaseException):
    """A rank has done the one operation that it was let do."""


class FakeStore:
    """A store whose answers to a rank are recorded, and given again when the rank runs again."""

    def __init__(self, content: dict[str, str], answers: list[Any]) -> None:
        self.content = content
        self.answers = answers
        self._next = 0
        self._may = True

    def _do(self, operation: Callable[[], Any]) -> Any:
        if self._next == len(self.answers):
            if not self._may:
                raise _Further
            self._may = False
            self.answers.append(operation())
        self._next += 1
        return self.answers[self._next - 1]

    def set(self, key: str, value: str) -> None:
        self._do(lambda: self.content.__setitem__(key, value))

    def get(self, key: str) -> bytes:
        return self._do(lambda: self.content[key].encode())

    def check(self, keys: list[str]) -> bool:
        return self._do(lambda: all(key in self.content for key in keys))

    def add(self, key: str, amount: int) -> int:
        def add() -> int:
            self.content[key] = str(int(self.content.get(key, "0")) + amount)
            return int(self.content[key])

        return self._do(add)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        def compare_set() -> bytes:
            if key not in self.content and expected:
                return expected.encode()
            if self.content.get(key, "") == expected:
                self.content[key] = desired
            return self.content[key].encode()

        return self._do(compare_set)

    def delete_key(self, key: str) -> bool:
        return self._do(lambda: self.content.pop(key, None) is not None)


class Rank:
    """What a rank knows, and what it may still do.

    A rank plays its script: "leave" and "fail" end its try in that way at any moment after it came,
    "stay" does not end it. The last word of a script is "stay". A rank that has met the others
    begins the next exchange of the same try, up to `steps`.
    """

    def __init__(self, number: int, size: int, script: tuple[str, ...], steps: int) -> None:
        self.number, self.size, self.steps = number, size, steps
        self.script = script
        self.tries = 0
        self.results: tuple[str, ...] = ()
        self.state = "new"
        self.meeting: Any = None
        self.step = 0
        self.answers: list[Any] = []
        self._key: Any = None

    @property
    def key(self) -> Any:
        """Everything that tells this rank from another one; found once."""
        if self._key is None:
            meeting = None
            if self.meeting is not None:
                known = {**vars(self.meeting), "_store": None, "_names": None}
                meeting = repr(known)  # whose attributes are always in one order
            self._key = self.state, self.step, self.script, self.results, meeting
            self._key += (repr(self.answers),)
        return self._key

    def copied(self) -> "Rank":
        """Returns a rank that may act while this one stays. `act` changes no meeting in place."""
        new = copy.copy(self)
        new.answers = list(self.answers)
        return new

    def act(self, what: str, content: dict[str, str]) -> None:
        """Goes one operation further in `what`."""
        self._key = None
        if what == "come" and not self.answers:
            self.start()
        before = self.meeting
        self.meeting = copy.copy(before)
        for name in ("_nonces", "_dead", "_heard", "_beside", "_left", "missing"):
            setattr(self.meeting, name, copy.copy(getattr(before, name)))
        store: Any = FakeStore(content, self.answers)
        self.meeting._store = store
        try:
            self._do(what)
        except _Further:
            self.meeting = before
            self.state = what
        else:
            self.answers = []

    def _do(self, what: str) -> None:
        meeting = self.meeting
        try:
            if what == "come":
                meeting.come(f"phase {self.step}", f"{self.number}.{self.tries}.{self.step}")
                self.state = "waiting"
            elif what == "look":
                self.state = "waiting"
                if meeting.look():
                    self._has_all()
            elif what == "leave":
                if meeting.give_up("too late"):
                    self._has_all()
                else:
                    self._end("left")
            elif what == "fail":
                meeting.fail("broken")
                self._end("failed")
        except OtherRankFailedError as error:
            assert error.reason in ("broken", "too late")
            self._end("told")

    def _has_all(self) -> None:
        texts = b" ".join(self.meeting.texts()).decode()
        self.results += (texts,)
        self.step += 1
        self.state = "met" if self.step == self.steps else "next"

    def _end(self, how: str) -> None:
        self.results += (how,)
        self.script = self.script[1:]
        self.state = "new"
        self.step = 0

    def choices(self) -> list[str]:
        if self.answers:
            return [self.state]
        if self.state == "met":
            return []
        if self.state in ("new", "next"):
            if self.state == "new" and not self.script:
                return []
            return ["come"]
        if self.script[0] == "stay":
            return ["look"]
        return ["look", self.script[0]]

    def start(self) -> None:
        if self.state == "new":
            self.tries += 1
            store: Any = None
            nonce = f"{self.number}.{self.tries}"
            self.meeting = Meeting(store, BASE, self.number, self.size, nonce)


def visit(scripts: list[tuple[str, ...]], steps: int = 1, limit: int = 2_000_000) -> list[Any]:
    """Returns the final states: those in which no rank can do anything but look in vain."""
    first = [Rank(number, len(scripts), script, steps) for number, script in enumerate(scripts)]
    waiting: list[tuple[dict[str, str], list[Rank]]] = [({}, first)]
    seen = {_key_of({}, first)}
    finals = []
    while waiting:
        content, ranks = waiting.pop()
        key = _key_of(content, ranks)
        assert len(seen) < limit
        _check(ranks)
        moved = False
        for number, rank in enumerate(ranks):
            for what in rank.choices():
                after_content, after = dict(content), list(ranks)
                after[number] = rank.copied()
                after[number].act(what, after_content)
                after_key = _key_of(after_content, after)
                moved = moved or after_key != key
                if after_key not in seen:
                    seen.add(after_key)
                    waiting.append((after_content, after))
        if not moved or all(_is_stuck_or_done(rank) for rank in ranks):
            finals.append((content, ranks))
    assert len(seen) > 50
    return finals


def walk(scripts: list[tuple[str, ...]], steps: int, draw: random.Random) -> list[Rank]:
    """Returns a final state, reached by operations of the ranks in an order that is drawn."""
    content: dict[str, str] = {}
    ranks = [Rank(number, len(scripts), script, steps) for number, script in enumerate(scripts)]
    for _ in range(20_000):
        able = [rank for rank in ranks if rank.choices()]
        if not able:
            return ranks
        rank = draw.choice(able)
        # A rank that leaves at its first chance would hardly meet others.
        what = draw.choice([*rank.choices()[:1] * 9, *rank.choices()])
        rank.act(what, content)
        _check(ranks)
    raise AssertionError([(rank.state, rank.results) for rank in ranks])


def _key_of(content: dict[str, str], ranks: list[Rank]) -> Any:
    return tuple(sorted(content.items())), tuple(rank.key for rank in ranks)


def _is_stuck_or_done(rank: Rank) -> bool:
    return not rank.choices()


def _check(ranks: list[Rank]) -> None:
    """No rank has met a try of another rank that has ended otherwise, or that met others."""
    for rank in ranks:
        for result in rank.results:
            if "." not in result:
                continue
            for other in ranks:
                theirs = result.split()[other.number]
                _, tries, step = map(int, theirs.split("."))
                assert step == int(result.split()[rank.number].split(".")[2])
                if other.tries == tries and other.state in ("waiting", "look", "next", "met"):
                    continue  # it is in this try, and may still find out
                if other.tries > tries or other.state == "new":
                    failed_behind = "failed" in other.results  # heard in the next exchange
                    assert result in other.results or failed_behind, (result, other.results)


@pytest.mark.parametrize(
    ("scripts", "steps"),
    slow_but(
        [([("stay",), ("stay",)], 2), ([("leave", "stay"), ("stay",)], 1)],
        [
            ([("stay",), ("stay",)], 2),
            ([("leave", "stay"), ("stay",)], 1),
            ([("stay",), ("leave", "stay")], 1),
            ([("leave", "stay"), ("stay", "stay")], 2),
        ],
    ),
)
def test_ranks_that_come_again_meet(scripts: list[tuple[str, ...]], steps: int) -> None:
    finals = visit(scripts, steps)
    assert finals
    for _, ranks in finals:
        _check_all_met(ranks)


def _check_all_met(ranks: list[Rank]) -> None:
    last = {rank.results[-1] for rank in ranks}
    assert len(last) == 1, [rank.results for rank in ranks]
    assert last.pop().count(".") == 2 * len(ranks)


@pytest.mark.parametrize(
    ("scripts", "steps"),
    [
        ([("leave", "stay"), ("leave", "stay")], 1),
        ([("stay",), ("stay",), ("stay",)], 2),
        ([("leave", "stay"), ("stay",), ("stay",)], 1),
        ([("leave", "leave", "stay"), ("stay",), ("leave", "stay")], 1),
    ],
)
def test_more_ranks_meet_in_any_order_that_was_drawn(
    scripts: list[tuple[str, ...]], steps: int
) -> None:
    """All states would take hours."""
    for seed in range(200):
        _check_all_met(walk(scripts, steps, random.Random(seed)))


@pytest.mark.parametrize("steps", slow_but([1], [1, 2]))
def test_a_rank_that_fails_is_heard_or_has_met_the_others(steps: int) -> None:
    finals = visit([("fail", "stay"), ("stay", "stay")], steps)
    assert finals
    for content, (failed, other) in finals:
        if failed.results[-1] == other.results[-1]:
            continue
        # It failed after the last exchange, and says so in the next, for which nobody comes.
        assert "failed" in failed.results[-1]
        assert other.results[-1] == f"0.1.{steps - 1} 1.1.{steps - 1}"
        word = content[f"{BASE}/{other.meeting.joined}/{steps}"]
        assert json.loads(word) == {"rank": 0, "error": "broken"}

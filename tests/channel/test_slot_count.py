"""How many slots a pair of ranks needs: all interleavings of an abstract channel are searched.

A rank may at any time do what the interface allows: begin a post (one put per peer, each a step of
its own), complete its oldest post once the messages of all peers are there, release its oldest
completed one. States that differ by whole rounds of the ring count as one, so the search ends and
its result holds for runs of any length. docs/design/channel.md tells the schedules found here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest

Vector = tuple[int, ...]
Matrix = tuple[Vector, ...]


class State(NamedTuple):
    """Counters of all ranks; `credits` and what is in flight only where headers carry credits."""

    put: Matrix  # [source][destination]
    completed: Vector
    released: Vector
    in_flight: tuple[Matrix, ...] = ()  # [source][destination] credits in uncompleted messages
    credit: Matrix = ()  # [rank][peer] messages that the peer is known to have released


class Broken(NamedTuple):
    """What must not happen."""

    what: str


Steps = Iterable[tuple[str, "State | Broken"]]


def search(start: State, steps: Callable[[State], Steps]) -> list[str] | None:
    """Returns the shortest schedule that breaks something or ends in a deadlock, if any."""
    origin: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        stuck = True
        for name, after in steps(state):
            stuck = False
            if isinstance(after, Broken):
                return [*schedule(state, origin), f"{name}: {after.what}"]
            if after not in origin:
                origin[after] = (state, name)
                queue.append(after)
        if stuck:
            return [*schedule(state, origin), "deadlock"]
    return None


def schedule(state: State, origin: dict[State, tuple[State, str] | None]) -> list[str]:
    names = []
    while (before := origin[state]) is not None:
        state, name = before
        names.append(name)
    return names[::-1]


def changed(vector: tuple[Any, ...], index: int, value: object) -> tuple[Any, ...]:
    return (*vector[:index], value, *vector[index + 1 :])


def next_put(put: Vector, me: int) -> tuple[int, int, bool]:
    """Returns the next destination, the sequence number, and whether its post has begun already."""
    ranks = len(put)
    peers = [(me + i) % ranks for i in range(1, ranks)]
    sequence = min(put[peer] for peer in peers)
    waiting = [peer for peer in peers if put[peer] == sequence]
    return waiting[0], sequence, len(waiting) < len(peers)


def ring(ranks: int, bound: int, slots: int, credits: str) -> list[str] | None:
    """Searches the channel as built. `credits`: what a put looks at before it writes to a slot.

    "none" writes blindly; "word" waits until the receiver's credit word permits it; "header" may
    not wait, and knows only what the headers of completed messages told.
    """
    zero = (0,) * ranks
    start = State((zero,) * ranks, zero, zero)
    if credits == "header":
        start = start._replace(in_flight=(((),) * ranks,) * ranks, credit=(zero,) * ranks)

    def put(state: State, me: int, peer: int, sequence: int) -> State | Broken | None:
        if credits == "header" and sequence >= state.credit[me][peer] + slots:
            return Broken("has no credit")
        if sequence >= state.released[peer] + slots:
            lost = sequence - slots
            return None if credits == "word" else Broken(f"overwrites {lost}, not released yet")
        after = state._replace(
            put=changed(state.put, me, changed(state.put[me], peer, sequence + 1))
        )
        if credits == "header":
            sent = (*state.in_flight[me][peer], state.released[me])
            row = changed(state.in_flight[me], peer, sent)
            after = after._replace(in_flight=changed(state.in_flight, me, row))
        return after

    def complete(state: State, me: int) -> State:
        after = state._replace(completed=changed(state.completed, me, state.completed[me] + 1))
        if credits == "header":
            for peer in range(ranks):
                if peer == me:
                    continue
                newest, *rest = after.in_flight[peer][me]
                row = changed(after.in_flight[peer], me, tuple(rest))
                known = changed(after.credit[me], peer, newest)
                after = after._replace(
                    in_flight=changed(after.in_flight, peer, row),
                    credit=changed(after.credit, me, known),
                )
        return after

    def steps(state: State) -> Steps:
        for me in range(ranks):
            peer, sequence, in_post = next_put(state.put[me], me)
            completed, released = state.completed[me], state.released[me]
            if in_post or sequence - released <= bound:
                after = put(state, me, peer, sequence)
                if after is not None:
                    yield f"{me} puts {sequence} to {peer}", rebased(after)
            if in_post:
                continue
            if completed < sequence and all(
                state.put[other][me] > completed for other in range(ranks) if other != me
            ):
                yield f"{me} completes {completed}", rebased(complete(state, me))
            if released < completed:
                after = state._replace(released=changed(state.released, me, released + 1))
                yield f"{me} releases {released}", rebased(after)

    def rebased(state: State | Broken) -> State | Broken:
        if isinstance(state, Broken):
            return state
        counters = [*state.released]
        counters += [c for i, row in enumerate(state.credit) for j, c in enumerate(row) if i != j]
        shift = min(counters) // slots * slots
        if shift == 0:
            return state

        def shifted(matrix: Matrix) -> Matrix:
            return tuple(
                tuple(0 if i == j else c - shift for j, c in enumerate(row))
                for i, row in enumerate(matrix)
            )

        return State(
            shifted(state.put),
            tuple(c - shift for c in state.completed),
            tuple(c - shift for c in state.released),
            tuple(tuple(tuple(c - shift for c in m) for m in row) for row in state.in_flight),
            shifted(state.credit),
        )

    return search(start, steps)


def paper(ranks: int, bound: int) -> list[str] | None:
    """Searches the scheme of the paper, section III-C, read in its own favour.

    `bound` buffers per pair (one for bound 0), at most as many posts under way; batch j is complete
    after ranks - 1 messages with tag j mod bound, and its buffers are read at that very moment.
    """
    buffers = max(bound, 1)

    def arrived(state: State, me: int, tag: int) -> int:
        """Messages with `tag` that no earlier completion has counted."""
        put = sum(len(range(tag, state.put[s][me], buffers)) for s in range(ranks) if s != me)
        return put - (ranks - 1) * len(range(tag, state.completed[me], buffers))

    def steps(state: State) -> Iterator[tuple[str, State | Broken]]:
        for me in range(ranks):
            peer, sequence, in_post = next_put(state.put[me], me)
            batch = state.completed[me]
            if in_post or sequence - batch < buffers:
                row = changed(state.put[me], peer, sequence + 1)
                yield (
                    f"{me} puts {sequence} to {peer}",
                    state._replace(put=changed(state.put, me, row)),
                )
            tag = batch % buffers
            if in_post or batch == sequence or arrived(state, me, tag) < ranks - 1:
                continue
            name = f"{me} completes {batch}"
            for source in range(ranks):
                newest = range(tag, state.put[source][me], buffers)
                if source != me and (not newest or newest[-1] != batch):
                    found = f"batch {newest[-1]}" if newest else "nothing"
                    yield name, Broken(f"reads {found} from {source}")
            yield name, state._replace(completed=changed(state.completed, me, batch + 1))

    zero = (0,) * ranks
    return search(State((zero,) * ranks, zero, zero), steps)


CASES = [(2, 0), (2, 1), (2, 2), (3, 0), (3, 1)]


@pytest.mark.parametrize(("ranks", "bound"), CASES)
def test_enough_slots_need_no_credits(ranks: int, bound: int) -> None:
    assert ring(ranks, bound, 2 * bound + 2, "none") is None


@pytest.mark.parametrize(("ranks", "bound"), CASES)
def test_one_slot_less_is_overwritten(ranks: int, bound: int) -> None:
    slots = 2 * bound + 1
    found = ring(ranks, bound, slots, "none")
    assert found is not None
    assert found[-1] == f"0 puts {slots} to 1: overwrites 0, not released yet"


@pytest.mark.parametrize(("ranks", "bound"), [(2, 0), (2, 1), (3, 0)])
def test_headers_return_credits_in_time(ranks: int, bound: int) -> None:
    assert ring(ranks, bound, 2 * bound + 2, "header") is None
    found = ring(ranks, bound, 2 * bound + 1, "header")
    assert found is not None and found[-1].endswith("has no credit")


@pytest.mark.parametrize(
    ("ranks", "bound", "slots"),
    [(ranks, bound, slots) for ranks, bound in CASES for slots in range(bound + 1, 2 * bound + 2)],
)
def test_fewer_slots_with_the_credit_word_only_wait(ranks: int, bound: int, slots: int) -> None:
    assert ring(ranks, bound, slots, "word") is None


@pytest.mark.parametrize(("ranks", "bound"), [(2, 0), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_the_papers_buffers_and_tags_give_wrong_messages(ranks: int, bound: int) -> None:
    found = paper(ranks, bound)
    assert found is not None and " reads " in found[-1]

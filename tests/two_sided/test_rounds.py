"""Which sends and receives a two-sided channel makes, over a group that notes them."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from torchrec_bls import _native
from torchrec_bls.collective.transport.rounds import PairwiseRounds
from torchrec_bls.collective.transport.sender import Sender
from torchrec_bls.collective.transport.shape import Shape

# Far beyond what a call takes: whatever ends a wait, it is not this.
NEVER = 3600.0
RANKS, BOUND = 3, 1
SHAPE = Shape("ids", 0, ["a"] * RANKS, 2 * (BOUND + 1), 256, NEVER)


def start(target: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


class NeverDone:
    """A receive whose message does not come."""

    def wait(self, timeout: timedelta) -> None:
        threading.Event().wait(timeout.total_seconds())


class NotingGroup:
    """Notes all calls, as ("send" or "recv", peer, bytes), and refuses some."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.refused: set[tuple[str, int]] = set()

    def _note(self, kind: str, tensors: list[torch.Tensor], peer: int) -> NeverDone:
        if (kind, peer) in self.refused:
            raise RuntimeError("Connection closed by peer")
        self.calls.append((kind, peer, tensors[0].numel()))
        return NeverDone()

    def send(self, tensors: list[torch.Tensor], peer: int, _: int) -> NeverDone:
        return self._note("send", tensors, peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, _: int) -> NeverDone:
        return self._note("recv", tensors, peer)


@pytest.fixture
def made() -> tuple[NotingGroup, Sender, PairwiseRounds]:
    group: Any = NotingGroup()
    slots = torch.zeros(SHAPE.slots, RANKS, SHAPE.slot_bytes, dtype=torch.uint8)
    inbox = _native.TwoSidedInbox(0, RANKS, SHAPE.slots, SHAPE.slot_bytes, slots)
    sender = Sender(start, inbox.failed)
    return group, sender, PairwiseRounds(group, 2, sender, SHAPE, slots, slots, inbox, start)


def test_receives_begin_as_early_as_their_slots_are_free(
    made: tuple[NotingGroup, Sender, PairwiseRounds],
) -> None:
    group, sender, rounds = made
    first = [("recv", peer, 256) for _ in range(BOUND + 1) for peer in (1, 2)]
    assert group.calls == first
    rounds.exchange(0, 0, [0, 40, 256])
    sender.drain(NEVER)
    # Before the message: no note that this rank can receive stands behind it.
    assert group.calls[len(first) :] == [
        ("recv", 1, 256),
        ("recv", 2, 256),
        ("send", 1, 40),
        ("send", 2, 256),
    ]


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_a_peer_with_a_gap_in_its_messages_gets_no_more(
    kind: str, made: tuple[NotingGroup, Sender, PairwiseRounds]
) -> None:
    # Messages count by their order: the next one would be taken for the one that is missing.
    group, sender, rounds = made
    group.refused.add((kind, 1))
    rounds.exchange(0, 0, [0, 40, 40])
    sender.drain(NEVER)
    group.refused.clear()
    group.calls.clear()
    rounds.exchange(1, 1, [0, 40, 40])
    sender.drain(NEVER)
    assert {(each, peer) for each, peer, _ in group.calls} == {
        ("send", 1),
        ("recv", 1),
        ("send", 2),
        ("recv", 2),
    } - {(kind, 1)}


def test_after_a_call_that_fails_nothing_is_sent() -> None:
    failures: list[str] = []
    made: list[int] = []

    def fail() -> None:
        raise MemoryError("no memory for a tensor")

    sender = Sender(start, failures.append)
    for call in (lambda: made.append(1), fail, lambda: made.append(2)):
        sender.put(call)
    sender.drain(NEVER)
    sender.stop(NEVER)
    assert failures == ["cannot send: no memory for a tensor"]
    assert made == [1]

"""How the slots of a round travel between the ranks of a two-sided channel.

See docs/design/two-sided.md.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchrec_bls import _native
from torchrec_bls.collective.transport.sender import Sender, Start
from torchrec_bls.collective.transport.shape import Shape

# Only the channel's deadlines count. A deadline of gloo would end all connections of a group.
FOREVER = timedelta(days=10_000)
# Seconds between two looks at something that no event announces, in rare moments.
PAUSE = 0.002


class Rounds(Protocol):
    """Moves the slots of rounds. What arrives it tells the inbox."""

    def exchange(self, slot: int, sequence: int, sizes: Sequence[int]) -> None:
        """Starts the exchange of a round. `sizes` are the bytes in use of each rank's outbox."""

    def settle(self, peer: int, seconds: float) -> None:
        """Waits until what a peer that is gone sent before has arrived."""

    def flush(self, end: float) -> None:
        """Waits, until `end` on the monotonic clock, for what was sent to leave."""

    def stop(self) -> None:
        """Has threads end that don't wait for a peer."""

    def threads(self) -> list[threading.Thread]:
        """Returns the threads that may wait for peers."""


class PairwiseRounds:
    """A message for each pair of ranks, over a gloo group that nobody else uses.

    A receive begins long before its message: bound + 1 rounds ahead, which is when its slot is
    free. So a message leaves at its post whatever its receiver does, and the note that gloo sends
    for each receive never stands behind messages of the other direction.

    Args:
        group: gloo group.
        tag: tag of the messages.
        sender: sends them.
        shape: shape of the channel.
        outboxes: bytes of shape [slots, world_size, slot_bytes]: of each round what the peers get,
            in their order, and one slot that nobody gets.
        inboxes: the same of what the peers send.
        inbox: told of what arrives.
        start: starts threads.
    """

    def __init__(
        self,
        group: Any,
        tag: int,
        sender: Sender,
        shape: Shape,
        outboxes: torch.Tensor,
        inboxes: torch.Tensor,
        inbox: _native.TwoSidedInbox,
        start: Start,
    ) -> None:
        self._group = group
        self._tag = tag
        self._sender = sender
        self._outboxes = _slots_by_peer(outboxes, shape)
        self._inboxes = _slots_by_peer(inboxes, shape)
        self._inbox = inbox
        self._start = start
        # In the order in which all ranks send.
        steps = range(1, shape.world_size)
        self._peers = [(shape.rank + step) % shape.world_size for step in steps]
        # A rank posts message n after it has released all up to n - bound - 1, so that the slot of
        # message n + bound + 1 is free. There are 2 (bound + 1) slots.
        self._ahead = shape.slots // 2
        self._expected: dict[int, SimpleQueue[dist.Work | None]] = {
            peer: SimpleQueue() for peer in self._peers
        }
        #: gloo sends nothing of which the work is gone. A slot is used again after the receiver
        #: has read it, and so after the work is done.
        self._sent: dict[tuple[int, int], dist.Work] = {}
        # A peer is in them until the first call that fails, since messages count by their order.
        self._sending_to, self._expecting_from = {*self._peers}, {*self._peers}
        for sequence in range(self._ahead):
            self._expect(sequence)
        self._receivers = {
            peer: start(partial(self._receive, peer), f"messages of rank {peer}")
            for peer in self._peers
        }

    def exchange(self, slot: int, sequence: int, sizes: Sequence[int]) -> None:
        """See Rounds."""
        self._sender.put(partial(self._send, slot, sequence, sizes))

    def _send(self, slot: int, sequence: int, sizes: Sequence[int]) -> None:
        self._expect(sequence + self._ahead)
        for peer in [peer for peer in self._peers if peer in self._sending_to]:
            message = self._outboxes[slot][peer][: sizes[peer]]
            try:
                self._sent[peer, slot] = self._group.send([message], peer, self._tag)
            except RuntimeError:  # the peer's listener reports that it is gone
                self._sending_to.remove(peer)

    def _expect(self, sequence: int) -> None:
        slots = self._inboxes[sequence % len(self._inboxes)]
        for peer in [peer for peer in self._peers if peer in self._expecting_from]:
            try:
                work = self._group.recv([slots[peer]], peer, self._tag)
            except RuntimeError:
                self._expecting_from.remove(peer)
                work = None
            self._expected[peer].put(work)

    def _receive(self, peer: int) -> None:
        for sequence in count():
            work = self._expected[peer].get()
            if work is None:
                return
            try:
                work.wait(FOREVER)
            except RuntimeError:
                return
            self._inbox.arrived(peer, sequence)

    def settle(self, peer: int, seconds: float) -> None:
        """See Rounds."""
        self._receivers[peer].join(seconds)

    def flush(self, end: float) -> None:
        """See Rounds. Peers that are gone, or have closed, take nothing."""
        # gloo tells only a thread that waits.
        leaving = {
            peer: self._start(partial(self._await_sent, peer), f"messages to rank {peer}")
            for peer in self._peers
        }
        while time.monotonic() < end and not self._inbox.poisoned:
            waiting = [
                thread
                for peer, thread in leaving.items()
                if thread.is_alive() and self._inbox.is_open(peer)
            ]
            if not waiting:
                return
            waiting[0].join(PAUSE)

    def _await_sent(self, peer: int) -> None:
        for (destination, _), work in [*self._sent.items()]:
            if destination == peer:
                with suppress(RuntimeError):
                    work.wait(FOREVER)

    def stop(self) -> None:
        """See Rounds."""
        for expected in self._expected.values():
            expected.put(None)

    def threads(self) -> list[threading.Thread]:
        """See Rounds."""
        return [*self._receivers.values()]


class CollectiveRounds:
    """An all-to-all for each round, on a group whose backend is not gloo, but MPI for instance.

    Its ranks have to expect the sizes that they send, and so whole slots travel.

    Args:
        group: any group.
        shape: shape of the channel.
        outboxes: as of PairwiseRounds.
        inboxes: as of PairwiseRounds.
        inbox: told of what arrives.
        start: starts threads.
    """

    def __init__(
        self,
        group: Any,
        shape: Shape,
        outboxes: torch.Tensor,
        inboxes: torch.Tensor,
        inbox: _native.TwoSidedInbox,
        start: Start,
    ) -> None:
        self._group = group
        self._outboxes = outboxes[:, :-1].flatten(1)
        self._inboxes = inboxes[:, :-1].flatten(1)
        self._inbox = inbox
        self._peers = [rank for rank in range(shape.world_size) if rank != shape.rank]
        self._sizes = [
            0 if rank == shape.rank else inboxes.shape[2] for rank in range(shape.world_size)
        ]
        self._options = dist.AllToAllOptions()
        self._options.timeout = FOREVER
        self._started = 0
        self._finished = 0
        self._rounds: SimpleQueue[tuple[int, dist.Work] | None] = SimpleQueue()
        self._completer = start(self._complete, "rounds")

    def exchange(self, slot: int, sequence: int, sizes: Sequence[int]) -> None:
        """See Rounds."""
        self._started = sequence + 1
        try:
            work = self._group.alltoall_base(
                self._inboxes[slot], self._outboxes[slot], self._sizes, self._sizes, self._options
            )
        except RuntimeError as error:
            self._inbox.failed(str(error))
            return
        self._rounds.put((sequence, work))

    def _complete(self) -> None:
        while (round_ := self._rounds.get()) is not None:
            sequence, work = round_
            try:
                work.wait()
            except RuntimeError as error:
                self._inbox.failed(str(error))
            else:
                for peer in self._peers:
                    self._inbox.arrived(peer, sequence)
            self._finished = sequence + 1

    def settle(self, peer: int, seconds: float) -> None:
        """See Rounds. It is in the round that is failing, or that is done soon."""
        end = time.monotonic() + seconds
        while self._finished < self._started and time.monotonic() < end:
            time.sleep(PAUSE)

    def flush(self, end: float) -> None:
        """See Rounds. A round does not end without one of the peers."""
        while self._finished < self._started and time.monotonic() < end:
            if self._inbox.poisoned or not all(map(self._inbox.is_open, self._peers)):
                return
            time.sleep(PAUSE)

    def stop(self) -> None:
        """See Rounds."""
        self._rounds.put(None)

    def threads(self) -> list[threading.Thread]:
        """See Rounds."""
        return [self._completer]


def _slots_by_peer(slots: torch.Tensor, shape: Shape) -> list[dict[int, torch.Tensor]]:
    peers = [rank for rank in range(shape.world_size) if rank != shape.rank]
    return [dict(zip(peers, of_round.unbind(), strict=False)) for of_round in slots]


def other_carrier(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Returns the group if its backend for CPU tensors is not gloo, but MPI for instance; else
    None.

    A new gloo group is better than the caller's: nothing else waits in its queue.
    """
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None  # only nccl
    # The name tells, not the type: TORCH_DISTRIBUTED_DEBUG=DETAIL wraps gloo in a class that waits
    # for all ranks.
    return None if backend.name() == "gloo" else group

"""The exchanges that the delay benchmark compares, each with a window of bound + 1 posts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from multiprocessing.synchronize import Semaphore
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchrec_bls import BoundedLagChannel

BYTES_PER_PAIR = 104 * 1024
LIMIT_SECONDS = 60.0

_WORDS = BYTES_PER_PAIR // 8
_HEADER_ROOM = 256

#: [source][destination], one counter for each ordered pair of ranks.
Counters = Sequence[Sequence[Semaphore]]


class Exchange(Protocol):
    """One rank's end of an all-to-all with a window."""

    def post(self, step: int) -> None:
        """Sends this rank's messages of `step`."""

    def complete(self, step: int) -> None:
        """Returns when the messages of `step` from all ranks can be read."""

    def release(self) -> None:
        """Gives the messages of the last completed step back."""

    def close(self) -> None:
        """Ends the exchange."""


class FreeExchange:
    """The ideal: moves nothing and keeps the bound.

    A post counts up one POSIX semaphore per peer, a completion counts down one per source. An
    uncontended count is an atomic operation in shared memory; a rank that has to wait sleeps in the
    kernel until that very post, so that neither polling nor its granularity enters the result. It
    stamps and checks messages to itself: that is the benchmark's work and not an exchange's.
    """

    def __init__(self, rank: int, counters: Counters, bound: int) -> None:
        others = [other for other in range(len(counters)) if other != rank]
        self._rank = rank
        self._messages = torch.zeros(bound + 1, len(counters), 1, dtype=torch.int64)
        self._stamps = self._messages.numpy()[:, :, -1]
        self._outgoing = [counters[rank][other] for other in others]
        self._incoming = [(other, counters[other][rank]) for other in others]

    def post(self, step: int) -> None:
        """Counts up."""
        self._stamps[step % len(self._stamps)] = _stamp(step, self._rank)
        for counter in self._outgoing:
            counter.release()

    def complete(self, step: int) -> None:
        """Counts down."""
        for source, counter in self._incoming:
            if not counter.acquire(timeout=LIMIT_SECONDS):
                raise RuntimeError(f"rank {source} did not post step {step} in {LIMIT_SECONDS} s")
        messages = self._messages[step % len(self._messages)]
        for source, _ in self._incoming:
            _check(messages[source], step, self._rank)

    def release(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class ChannelExchange:
    """`BoundedLagChannel`; messages are read in place and released after the dense part."""

    def __init__(self, group: dist.ProcessGroup, bound: int) -> None:
        self._rank, self._world = group.rank(), group.size()
        self._others = [other for other in range(self._world) if other != self._rank]
        messages = torch.zeros(self._world, _WORDS, dtype=torch.int64)
        self._stamps = messages.numpy()[:, -1]
        # Nobody moves a rank's own block.
        self._parts = [[messages[to]] if to != self._rank else [] for to in range(self._world)]
        self._channel = BoundedLagChannel(
            group, bound=bound, slot_bytes=BYTES_PER_PAIR + _HEADER_ROOM, deadline=LIMIT_SECONDS
        )

    def post(self, step: int) -> None:
        """Puts into the peers' slots."""
        self._stamps[:] = _stamp(step, self._rank)
        self._channel.post(self._parts)

    def complete(self, step: int) -> None:
        """Waits, takes a tensor of each message and checks its last word."""
        self._arrival = self._channel.wait()
        for source in self._others:
            _check(self._arrival.tensor(source, 0, torch.int64), step, source)

    def release(self) -> None:
        """Releases the slots."""
        self._arrival.release()

    def close(self) -> None:
        """Closes the channel."""
        pulled = self._channel.stats().pulled_messages
        self._channel.close()
        if pulled:
            raise RuntimeError(f"{pulled} messages did not fit into their slots")


class GlooExchange:
    """`all_to_all_single` with equal splits, asynchronous; no sizes are exchanged."""

    def __init__(self, group: dist.ProcessGroup, bound: int) -> None:
        self._group = group
        self._rank, self._world = group.rank(), group.size()
        self._others = [other for other in range(self._world) if other != self._rank]
        shape = (bound + 1, self._world, _WORDS)
        self._send = torch.zeros(shape, dtype=torch.int64)
        self._stamps = self._send.numpy()[:, :, -1]
        self._receive = torch.zeros(shape, dtype=torch.int64)
        self._pending: deque[Any] = deque()

    def post(self, step: int) -> None:
        """Queues the collective on gloo's threads."""
        slot = step % len(self._send)
        self._stamps[slot] = _stamp(step, self._rank)
        self._pending.append(
            dist.all_to_all_single(
                self._receive[slot], self._send[slot], group=self._group, async_op=True
            )
        )

    def complete(self, step: int) -> None:
        """Waits, takes a tensor of each message and checks its last word."""
        self._pending.popleft().wait()
        received = self._receive[step % len(self._receive)]
        for source in self._others:
            _check(received[source], step, source)

    def release(self) -> None:
        """Does nothing: the next post but `bound` uses the buffer again."""

    def close(self) -> None:
        """Does nothing."""


def _stamp(step: int, source: int) -> int:
    return step * 1000 + source + 1


def _check(message: torch.Tensor, step: int, source: int) -> None:
    if (found := int(message[-1])) != (expected := _stamp(step, source)):
        raise RuntimeError(
            f"message of step {step} from rank {source} ends with {found}, not {expected}"
        )

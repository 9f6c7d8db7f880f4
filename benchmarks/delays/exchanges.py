"""Exchanges with a window of bound + 1 posts, whose messages say their step and source."""

from collections import deque
from collections.abc import Sequence
from multiprocessing.synchronize import Semaphore
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from dlrm_plain.exchange import Start

from benchmarks.exchange.peers import HEADER_ROOM, close_unpulled
from torchrec_bls import BoundedLagChannel

LIMIT_SECONDS = 60.0

#: (steps, source, destination), 8 bytes each; nobody moves a rank's own block.
Words = npt.NDArray[np.int64]
#: [source][destination], one counter for each ordered pair of ranks.
Counters = Sequence[Sequence[Semaphore]]


class Exchange:
    """One rank's end of an all-to-all with a window.

    The last word of every message says step and source, and is checked on arrival.
    """

    def __init__(self, rank: int, words: Words) -> None:
        self._rank = rank
        self._words = words
        self._others = [other for other in range(words.shape[1]) if other != rank]

    def post(self, step: int) -> None:
        """Sends this rank's messages of `step`."""
        raise NotImplementedError

    def complete(self, step: int) -> None:
        """Returns when the messages of `step` from all ranks can be read."""
        raise NotImplementedError

    def release(self) -> None:
        """Gives the messages of the last completed step back."""

    def close(self) -> None:
        """Ends the exchange."""

    def _stamp(self, step: int) -> int:
        return 1000 * step + self._rank

    def _check(self, message: torch.Tensor, step: int, source: int) -> None:
        expected = (step, source, int(self._words[step, source, self._rank]))
        if (found := (*divmod(int(message[-1]), 1000), len(message))) != expected:
            raise RuntimeError(f"got (step, source, words) {found}, expected {expected}")


class FreeExchange(Exchange):
    """The ideal: moves nothing and keeps the bound.

    A post counts up one POSIX semaphore per peer, a completion counts down one per source. An
    uncontended count is an atomic operation in shared memory; a rank that has to wait sleeps in the
    kernel until that very post, so that neither polling nor its granularity enters the result. It
    stamps and checks words of its own: that is the benchmark's work and not an exchange's.
    """

    def __init__(self, rank: int, words: Words, counters: Counters) -> None:
        super().__init__(rank, np.minimum(words, 1))
        self._messages = torch.zeros(len(words), words.shape[1], 1, dtype=torch.int64)
        self._sources = torch.arange(words.shape[1])[:, None]
        self._counters = counters

    def post(self, step: int) -> None:
        """Counts up."""
        self._messages[step] = 1000 * step + self._sources
        for other in self._others:
            self._counters[self._rank][other].release()

    def complete(self, step: int) -> None:
        """Counts down."""
        for source in self._others:
            if not self._counters[source][self._rank].acquire(timeout=LIMIT_SECONDS):
                raise RuntimeError(f"rank {source} did not post step {step} in {LIMIT_SECONDS} s")
            self._check(self._messages[step, source], step, source)


class ChannelExchange(Exchange):
    """`BoundedLagChannel`; messages are read in place and released after the dense part."""

    def __init__(self, rank: int, words: Words, bound: int, transport: str = "auto") -> None:
        super().__init__(rank, words)
        world = dist.group.WORLD
        assert world is not None
        self._messages = torch.zeros(words.shape[1], int(words.max()), dtype=torch.int64)
        self._channel = BoundedLagChannel(
            world,
            bound=bound,
            slot_bytes=8 * int(words.max()) + HEADER_ROOM,
            transport=transport,
            deadline=LIMIT_SECONDS,
            name=f"{transport}, bound {bound}",
        )

    def post(self, step: int) -> None:
        """Puts into the peers' slots."""
        parts: list[list[torch.Tensor]] = [[] for _ in self._messages]
        for to in self._others:
            message = self._messages[to, : self._words[step, self._rank, to]]
            message[-1] = self._stamp(step)
            parts[to] = [message]
        self._channel.post(parts)

    def complete(self, step: int) -> None:
        """Waits, takes a tensor of each message and checks its last word."""
        self._arrival = self._channel.wait()
        for source in self._others:
            self._check(self._arrival.tensor(source, 0, torch.int64), step, source)

    def release(self) -> None:
        """Releases the slots."""
        self._arrival.release()

    def close(self) -> None:
        """Closes the channel, whose slots must have sufficed."""
        close_unpulled(self._channel)


class TorchExchange(Exchange):
    """Asynchronous all-to-alls of a backend, with sizes that all know, into the caller's memory."""

    def __init__(self, rank: int, words: Words, bound: int, start: Start) -> None:
        super().__init__(rank, words)
        self._start = start
        most = (bound + 1, int(words.sum(axis=2).max())), (bound + 1, int(words.sum(axis=1).max()))
        self._sent, self._received = (torch.zeros(shape, dtype=torch.int64) for shape in most)
        self._under_way: deque[Any] = deque()

    def post(self, step: int) -> None:
        """Queues the collective on the backend's threads."""
        buffer = step % len(self._sent)
        sends = self._words[step, self._rank].tolist()
        receives = self._words[step, :, self._rank].tolist()
        sent = self._sent[buffer, : sum(sends)]
        for message in sent.split(sends):
            if len(message):
                message[-1] = self._stamp(step)
        received = self._received[buffer, : sum(receives)]
        self._under_way.append((self._start(received, sent, receives, sends), received, receives))

    def complete(self, step: int) -> None:
        """Waits, and checks each message's last word."""
        work, received, receives = self._under_way.popleft()
        work.wait()
        for source, message in enumerate(received.split(receives)):
            if source != self._rank:
                self._check(message, step, source)

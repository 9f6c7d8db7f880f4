"""Times all-to-alls among this group's ranks: Python peers here, native programs on rank 0.

Every rank calls the same, and gets what all agree on. Python is timed like native/measurement.h.
"""

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.exchange import native
from benchmarks.harness.launch import gathered, pin_to_core
from torchrec_bls import BoundedLagChannel

#: Of both kinds: number of calls in a sample at most, least and largest number of samples.
_SINGLE, _TRAIN = (1, 7, 2000), (1000, 3, 25)
# Of the words that ranks share: one in a cache line for each rank's barrier, and behind them the
# number of samples to stop at.
_MAX_RANKS, _CACHE_LINE_WORDS = 16, 8
_STOP_AT = _MAX_RANKS * _CACHE_LINE_WORDS
HEADER_ROOM = 256


def close_unpulled(channel: BoundedLagChannel) -> None:
    """Closes a channel whose slots must have sufficed; an exchange that pulls measures others."""
    pulled = channel.stats().pulled_messages
    channel.close()
    if pulled:
        raise RuntimeError(f"{pulled} messages did not fit into their slots")


class _ChannelPeer:
    def __init__(self, size: int) -> None:
        self.outgoing = list(torch.zeros(dist.get_world_size(), size // 8, dtype=torch.int64))
        self._parts = [[t] if to != dist.get_rank() else [] for to, t in enumerate(self.outgoing)]
        self._channel = BoundedLagChannel(dist.group.WORLD, bound=0, slot_bytes=size + HEADER_ROOM)

    def exchange(self) -> None:
        self._channel.post(self._parts)
        self._arrival = self._channel.wait()

    def view(self, source: int) -> torch.Tensor:
        return self._arrival.tensor(source, 0, torch.int64)

    def release(self) -> None:
        self._arrival.release()

    def close(self) -> None:
        close_unpulled(self._channel)


class _BackendPeer:
    def __init__(self, backend: str, size: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend=backend)
        self._splits = [0 if of == rank else size // 8 for of in range(world)]
        self._send = torch.zeros(sum(self._splits), dtype=torch.int64)
        self._receive = torch.zeros_like(self._send)
        self.outgoing = list(self._send.split(self._splits))
        self._received = self._receive.split(self._splits)

    def exchange(self) -> None:
        dist.all_to_all_single(
            self._receive, self._send, self._splits, self._splits, group=self._group
        )

    def view(self, source: int) -> torch.Tensor:
        return self._received[source]

    def release(self) -> None:
        pass

    def close(self) -> None:
        dist.destroy_process_group(self._group)


#: What is called from Python, made with the bytes for each other rank. `exchange()` returns when
#: the `outgoing` words of all ranks, by destination, can be read: `view(source)` is valid until
#: `release()`. A rank's own block needs no transfer; no peer moves it.
PEERS: dict[str, Callable[[int], Any]] = {
    "channel_python": _ChannelPeer,
    "gloo": partial(_BackendPeer, "gloo"),
    "bls": partial(_BackendPeer, "bls"),
}


class Timing:
    """Times peers on this rank, which is pinned to a core from now on."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._others = [other for other in range(ranks) if other != rank]
        # All ranks of this host share these words, which start as zeros.
        with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="bls-timing-") as file:
            words = np.memmap(gathered(file.name)[0], np.int64, "r+", shape=_STOP_AT + 1)
            dist.barrier()
        self._words = memoryview(words)
        self._round = 0
        self._cores = sorted(os.sched_getaffinity(0))
        #: Open MPI's settings to try, by description; none without MPI.
        self.mpi = native.mpi_settings(ranks) if native.mpi_version() else {}
        pin_to_core(rank)
        torch.set_num_threads(1)

    def measure(
        self, name: str, size: int, mpi: str, *, seconds: float = 0.0, calls: int = 0
    ) -> dict[str, float]:
        """Median µs a call of single calls, "one_shot", and of trains, "train", `seconds` each.

        Of one of PEERS or of native.PROGRAMS, with `size` bytes for each other rank; Open MPI with
        the setting `mpi` of `self.mpi`. Given `calls`, one train of so many is all that runs.
        """
        if name in native.PROGRAMS:
            measured: dict[str, float] = {}
            if self._rank == 0:  # all others wait in the kernel
                how = ("--repetitions", calls) if calls else ("--seconds", seconds)
                ranks, parameters = 1 + len(self._others), self.mpi.get(mpi, {})
                measured = native.run(name, ranks, ("--bytes", size, *how), parameters, self._cores)
            return gathered(measured)[0]
        self._peer = PEERS[name](size)
        for _ in range(3):
            self._timed(1, every_word=True)
        if calls:
            measured = {"train": 1e6 * max(gathered(self._timed(calls)))}
        else:
            begin = time.perf_counter()
            for _ in range(5):
                self._timed(1)
            single = self._sampled((time.perf_counter() - begin) / 5, seconds, *_SINGLE)
            train = self._sampled(self._timed(5), seconds, *_TRAIN)
            measured = {"one_shot": single, "train": train}
        self._timed(1, every_word=True)
        self._peer.close()
        return measured

    def _sampled(self, mine: float, seconds: float, longest: int, least: int, most: int) -> float:
        """Median µs a call of samples for so many seconds, after an estimate of a call's."""
        # All ranks must take the same number of calls, so rank 0 decides.
        estimate = gathered(mine)[0]
        length = int(np.clip(seconds / 5 / estimate, min(5, longest), longest))
        if self._rank == 0:
            wanted = np.clip(seconds / (length * estimate), least, most)
            self._words[_STOP_AT] = int(wanted)
        self._barrier()
        end = time.perf_counter() + 2 * seconds
        samples: list[float] = []
        # Fewer samples when other load on the machine makes them slower than estimated.
        while len(samples) < self._words[_STOP_AT]:
            # Seen by all ranks before they ask again: there is a barrier in every sample.
            if self._rank == 0 and len(samples) + 1 >= least and time.perf_counter() > end:
                self._words[_STOP_AT] = len(samples) + 1
            samples.append(self._timed(length))
        return float(1e6 * np.median(np.max(gathered(samples), axis=0)))

    def _timed(self, length: int, every_word: bool = False) -> float:
        """Seconds a call, of so many back to back; the last one's release is not in the time.

        The last one's messages are checked: their first and last words, or all.
        """
        exchange, release = self._peer.exchange, self._peer.release
        self._write(every_word)
        self._barrier()
        start = time.perf_counter()
        for _ in range(length - 1):
            exchange()
            release()
        exchange()
        elapsed = time.perf_counter() - start
        self._barrier()  # checks take longer than calls, and a core that others wait for
        self._check(every_word)
        release()
        return elapsed / length

    def _barrier(self) -> None:
        # The same barrier as the native programs': one word per rank, everybody polls all.
        words, mine = self._words, self._rank * _CACHE_LINE_WORDS
        epoch = words[mine] = words[mine] + 1
        for other in self._others:
            polls = 0
            while words[other * _CACHE_LINE_WORDS] < epoch:
                polls += 1
                if polls > 10:
                    os.sched_yield()

    def _write(self, every_word: bool) -> None:
        self._round += 1
        for to in self._others:
            words, stamps = self._stamped(self._peer.outgoing[to], self._rank, to, every_word)
            words[:] = stamps

    def _check(self, every_word: bool) -> None:
        for source in self._others:
            message = self._peer.view(source)
            if not torch.equal(*self._stamped(message, source, self._rank, every_word)):
                raise RuntimeError(f"message from rank {source} differs from what it sent")

    def _stamped(
        self, message: torch.Tensor, source: int, to: int, every_word: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those words of a message that are looked at, and what they have to be."""
        step = 1 if every_word else max(len(message) - 1, 1)
        first = self._round * 1_000_003 + source * 101 + to + 1
        return message[::step], torch.arange(first, first + len(message), step)

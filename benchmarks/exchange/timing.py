"""Times all-to-alls among this group's ranks: Python peers here, native programs on rank 0.

Every rank calls the same, and gets what all agree on. The measuring shape of Python peers is that
of native/measurement.h.
"""

import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.exchange import native
from benchmarks.exchange.peers import PEERS
from benchmarks.harness.launch import gathered, pin_to_core

#: Of both kinds: number of calls in a sample at most, least and largest number of samples.
_SINGLE, _TRAIN = (1, 7, 2000), (1000, 3, 25)
# Of the words that ranks share: one in a cache line for each rank's barrier, and behind them the
# number of samples to stop at.
_MAX_RANKS, _CACHE_LINE_WORDS = 16, 8
_STOP_AT = _MAX_RANKS * _CACHE_LINE_WORDS


class Timing:
    """Times peers on this rank, which is pinned to a core from now on."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._others = [other for other in range(ranks) if other != rank]
        self._words = _shared_words()
        self._round = 0
        self._cores = sorted(os.sched_getaffinity(0))
        #: Open MPI's settings to try, by description; none without MPI.
        self.mpi = native.mpi_settings(ranks) if native.mpi_version() else {}
        pin_to_core(rank)
        torch.set_num_threads(1)

    def measure(self, name: str, size: int, seconds: float, mpi: str = "") -> dict[str, float]:
        """Median µs a call of single calls, "one_shot", and of trains, "train".

        Args:
            name: one of PEERS or of native.PROGRAMS.
            size: bytes for each other rank.
            seconds: aimed at, for each of both.
            mpi: key of `self.mpi`, for "open_mpi".
        """
        if name in native.PROGRAMS:
            return self._native(name, size, mpi, "--seconds", seconds)
        with self._verified(name, size):
            begin = time.perf_counter()
            for _ in range(5):
                self._timed(1)
            single = self._sampled((time.perf_counter() - begin) / 5, seconds, *_SINGLE)
            return {"one_shot": single, "train": self._sampled(self._timed(5), seconds, *_TRAIN)}

    def repeat(self, name: str, size: int, calls: int, mpi: str = "") -> float:
        """Mean µs a call of so many back to back, on the slowest rank."""
        if name in native.PROGRAMS:
            return self._native(name, size, mpi, "--repetitions", calls)["train"]
        with self._verified(name, size):
            return float(1e6 * max(gathered(self._timed(calls))))

    def _native(self, name: str, size: int, mpi: str, *how: object) -> dict[str, float]:
        measured = {}
        if self._rank == 0:
            # All others wait in the kernel.
            ranks, parameters = 1 + len(self._others), self.mpi.get(mpi, {})
            measured = native.run(name, ranks, ["--bytes", size, *how], parameters, self._cores)
        result: dict[str, float] = gathered(measured)[0]
        return result

    @contextmanager
    def _verified(self, name: str, size: int) -> Iterator[None]:
        """Makes a peer, and checks every word that it moves before and after it is timed."""
        group = dist.group.WORLD
        assert group is not None
        self._peer = PEERS[name](group, size)
        for _ in range(3):
            self._verify_every_word()
        yield
        self._verify_every_word()
        self._peer.close()

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

    def _timed(self, length: int) -> float:
        """Seconds a call, of so many back to back; the last one's release is not in the time."""
        peer = self._peer
        self._write(ends_only=True)
        self._barrier()
        start = time.perf_counter()
        for _ in range(length - 1):
            peer.exchange()
            peer.release()
        peer.exchange()
        elapsed = time.perf_counter() - start
        self._check(ends_only=True)
        peer.release()
        return elapsed / length

    def _barrier(self) -> None:
        # The same barrier as the native programs': one word per rank, everybody polls all.
        words, mine = self._words, self._rank * _CACHE_LINE_WORDS
        epoch = words[mine] = words[mine] + 1
        for other in self._others:
            at = other * _CACHE_LINE_WORDS
            polls = 0
            while words[at] < epoch:
                polls += 1
                if polls > 10:
                    os.sched_yield()

    def _verify_every_word(self) -> None:
        self._write()
        self._peer.exchange()
        self._check()
        self._peer.release()

    def _write(self, ends_only: bool = False) -> None:
        self._round += 1
        for to in self._others:
            message = self._peer.outgoing[to]
            step, words = self._stamped(self._rank, to, len(message), ends_only)
            message[::step] = words

    def _check(self, ends_only: bool = False) -> None:
        for source in self._others:
            message = self._peer.view(source)
            step, words = self._stamped(source, self._rank, len(message), ends_only)
            if not torch.equal(message[::step], words):
                raise RuntimeError(f"message from rank {source} differs from what it sent")

    def _stamped(self, source: int, to: int, length: int, ends: bool) -> tuple[int, torch.Tensor]:
        """Every how manieth word of a message is looked at, and these; word i is its stamp + i."""
        step = max(length - 1, 1) if ends else 1
        stamp = self._round * 1_000_003 + source * 101 + to + 1
        return step, torch.arange(stamp, stamp + length, step)


def _shared_words() -> memoryview:
    """Words of 64 bits that all ranks of this host share; they start as zeros."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="bls-timing-") as file:
        file.truncate(8 * (_STOP_AT + 1))
        with Path(gathered(file.name)[0]).open("r+b") as of_rank_0:
            memory = mmap.mmap(of_rank_0.fileno(), 0)
        dist.barrier()
    return memoryview(memory).cast("Q")

"""The all-to-all peers that are called from Python: our channel, our backend and gloo.

One process per rank lives for all cells of a rank count, so that importing torch is paid once. The
measuring shape is that of native/measurement.h.
"""

import ctypes
import os
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.exchange.peers import PEERS, Peer
from benchmarks.harness.record import pin_to_core
from benchmarks.harness.statistics import Spread

_MAX_SAMPLES, _TRAIN_LENGTH, _MOST_TRAINS = 2000, 1000, 25
_MIN_ONE_SHOTS, _MIN_TRAINS = 7, 3
_MAX_RANKS, _CACHE_LINE_WORDS = 16, 8
_LIMIT_SECONDS = 120


class _Shared(ctypes.Structure):
    """Memory that all ranks share; each rank's `arrived` word has its own cache line."""

    _fields_ = (
        ("arrived", ctypes.c_uint64 * (_MAX_RANKS * _CACHE_LINE_WORDS)),
        ("estimate", ctypes.c_double),
        ("stop_at", ctypes.c_uint64),
    )


class _Measurement:
    """Measures one peer on one rank."""

    def __init__(self, peer: Peer, rank: int, world: int, shared: Any) -> None:
        self._peer = peer
        self._rank = rank
        self._others = [other for other in range(world) if other != rank]
        self._shared = shared
        self._round = 0

    def run(self, seconds: float) -> dict[str, Any]:
        """Seconds per call of this rank, for each sample of both measurements."""
        for _ in range(3):
            self._verify_every_word()
        start = time.perf_counter()
        for _ in range(5):
            self._timed(1)
        estimate = self._agree((time.perf_counter() - start) / 5)
        calls = int(min(max(seconds / estimate, _MIN_ONE_SHOTS), _MAX_SAMPLES))
        one_shot = self._sample(calls, _MIN_ONE_SHOTS, 2 * seconds, 1)
        estimate = self._agree(self._timed(5))
        length = int(min(max(seconds / 5 / estimate, 5), _TRAIN_LENGTH))
        trains = int(min(max(seconds / (length * estimate), _MIN_TRAINS), _MOST_TRAINS))
        train = self._sample(trains, _MIN_TRAINS, 2 * seconds, length)
        self._verify_every_word()
        return {"one_shot": one_shot, "train": train, "length": length}

    def repeat(self, repetitions: int) -> float:
        """Seconds per call of this rank in one train of so many calls."""
        for _ in range(3):
            self._verify_every_word()
        seconds = self._timed(repetitions)
        self._verify_every_word()
        return seconds

    def _sample(self, most: int, least: int, limit: float, length: int) -> list[float]:
        # Fewer than `most` when other load on the machine makes them slower than estimated.
        if self._rank == 0:
            self._shared.stop_at = most
        self._barrier()
        end = time.perf_counter() + limit
        seconds: list[float] = []
        while len(seconds) < self._shared.stop_at:
            # Seen by all ranks before they ask again: there is a barrier in every sample.
            if self._rank == 0 and len(seconds) + 1 >= least and time.perf_counter() > end:
                self._shared.stop_at = len(seconds) + 1
            seconds.append(self._timed(length))
        return seconds

    def _timed(self, length: int) -> float:
        """Seconds a call, of so many back to back; the last one's release is not in the time."""
        peer = self._peer
        self._round += 1
        for to in self._others:
            peer.outgoing[to][0] = peer.outgoing[to][-1] = self._stamp_of(self._rank, to)
        self._barrier()
        start = time.perf_counter()
        for _ in range(length - 1):
            peer.exchange()
            peer.release()
        peer.exchange()
        elapsed = time.perf_counter() - start
        for source in self._others:
            view, expected = peer.view(source), self._stamp_of(source, self._rank)
            self._require(int(view[0]) == expected and int(view[-1]) == expected, source)
        peer.release()
        return elapsed / length

    def _barrier(self) -> None:
        # The same barrier as the native programs': one word per rank, everybody polls all.
        arrived, mine = self._shared.arrived, self._rank * _CACHE_LINE_WORDS
        epoch = arrived[mine] = arrived[mine] + 1
        for other in self._others:
            at = other * _CACHE_LINE_WORDS
            polls = 0
            while arrived[at] < epoch:
                polls += 1
                if polls > 10:
                    os.sched_yield()

    def _agree(self, seconds: float) -> float:
        if self._rank == 0:
            self._shared.estimate = seconds
        self._barrier()
        agreed: float = self._shared.estimate
        self._barrier()
        return agreed

    def _verify_every_word(self) -> None:
        self._round += 1
        for to in self._others:
            torch.arange(len(self._peer.outgoing[to]), out=self._peer.outgoing[to])
            self._peer.outgoing[to].add_(self._stamp_of(self._rank, to))
        self._peer.exchange()
        for source in self._others:
            view = self._peer.view(source)
            expected = torch.arange(len(view)) + self._stamp_of(source, self._rank)
            self._require(torch.equal(view, expected), source)
        self._peer.release()

    def _stamp_of(self, source: int, destination: int) -> int:
        return self._round * 1_000_003 + source * 101 + destination + 1

    def _require(self, same: bool, source: int) -> None:
        if not same:
            raise RuntimeError(f"message from rank {source} differs from what it sent")


def _serve(rank: int, world: int, store: str, shared: Any, tasks: Connection) -> None:
    pin_to_core(rank)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    tasks.send(True)
    while (task := tasks.recv()) is not None:
        name, size, method, argument = task
        try:
            peer = PEERS[name](dist.group.WORLD, size)
            tasks.send(getattr(_Measurement(peer, rank, world, shared), method)(argument))
            peer.close()
        except Exception:
            tasks.send(traceback.format_exc())
            raise
    dist.destroy_process_group()


class Ranks:
    """The rank processes of one world size; use it in a `with` statement."""

    def __init__(self, world: int) -> None:
        """Starts `world` processes and joins them in a gloo group."""
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="bls-alltoall-")
        store = (Path(self._folder.name) / "store").as_uri()
        shared = context.RawValue(_Shared)
        self._ranks: list[tuple[Connection, Any]] = []
        for rank in range(world):
            mine, theirs = context.Pipe()
            arguments = (rank, world, store, shared, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((mine, process))
        # Whoever measures something else first would measure how these start.
        self._answers()

    def measure(self, peer: str, size: int, seconds: float) -> dict[str, Any]:
        """Runs one of PEERS; the result has the native programs' form."""
        answers = self._ask(peer, size, "run", seconds)
        return {
            kind: _summarize([a[kind] for a in answers], length)
            for kind, length in (("one_shot", 1), ("train", answers[0]["length"]))
        }

    def repeat(self, peer: str, size: int, repetitions: int) -> float:
        """One train of `repetitions` calls: microseconds a call of the slowest rank."""
        return 1e6 * max(self._ask(peer, size, "repeat", repetitions))

    def _ask(self, *task: Any) -> list[Any]:
        for pipe, _ in self._ranks:
            pipe.send(task)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for rank, (pipe, _) in enumerate(self._ranks):
            if not pipe.poll(_LIMIT_SECONDS):
                raise RuntimeError(f"rank {rank} gave no result within {_LIMIT_SECONDS} s")
            answers.append(pipe.recv())
            if isinstance(answers[-1], str):
                raise RuntimeError(f"rank {rank} failed:\n{answers[-1]}")
        return answers

    def __enter__(self) -> "Ranks":
        """Gives the ranks themselves."""
        return self

    def __exit__(self, *failure: object) -> None:
        """Ends the processes: when asked normally, at once after a failure."""
        for pipe, process in self._ranks:
            if failure[0] is not None:
                process.kill()
            elif process.is_alive():
                pipe.send(None)
        for _, process in self._ranks:
            process.join()
        self._folder.cleanup()


def _summarize(seconds: Sequence[Sequence[float]], length: int) -> dict[str, Any]:
    slowest = Spread([1e6 * max(sample) for sample in zip(*seconds, strict=True)])
    quartiles = {f"{name}_us": slowest[name] for name in ("q1", "median", "q3")}
    return {"samples": slowest["samples"], "length": length, **quartiles}

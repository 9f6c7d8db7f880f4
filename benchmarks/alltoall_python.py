"""The all-to-all peers that are called from Python: our channel, our backend and gloo.

One process per rank lives for all cells of a rank count, so that importing torch is paid once. The
measuring shape is that of native/measurement.h.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from alltoall_peers import PEERS, Peer
from common import pin_to_core, spread

_MAX_SAMPLES = 2000
_TRAIN_LENGTH = 1000
_MIN_ONE_SHOTS = 7
_MIN_TRAINS = 3
_MAX_RANKS = 16
_CACHE_LINE_WORDS = 8
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

    def __init__(self, peer: Peer, rank: int, world: int, shared: Any, touch: bool) -> None:
        self._peer = peer
        self._rank = rank
        self._others = [other for other in range(world) if other != rank]
        self._shared = shared
        self._arrived = shared.arrived
        self._touch = touch
        self._round = 0

    def run(self, seconds: float) -> dict[str, Any]:
        """Seconds per call of this rank, for each sample of both measurements."""
        for _ in range(3):
            self._verify_every_word()
        start = time.perf_counter()
        for _ in range(5):
            self._one_shot()
        estimate = self._agree((time.perf_counter() - start) / 5)
        calls = int(min(max(seconds / estimate, _MIN_ONE_SHOTS), _MAX_SAMPLES))
        one_shot = self._sample(calls, _MIN_ONE_SHOTS, 2 * seconds, self._one_shot)
        estimate = self._agree(self._train(5))
        length = int(min(max(seconds / 5 / estimate, 5), _TRAIN_LENGTH))
        trains = int(min(max(seconds / (length * estimate), _MIN_TRAINS), 25))
        train = self._sample(trains, _MIN_TRAINS, 2 * seconds, lambda: self._train(length))
        self._verify_every_word()
        return {"one_shot": one_shot, "train": train, "length": length}

    def repeat(self, repetitions: int) -> float:
        """Seconds per call of this rank in one train of so many calls."""
        for _ in range(3):
            self._verify_every_word()
        seconds = self._train(repetitions)
        self._verify_every_word()
        return seconds

    def _sample(
        self, most: int, least: int, limit: float, timed: Callable[[], float]
    ) -> list[float]:
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
            seconds.append(timed())
        return seconds

    def _barrier(self) -> None:
        # The same barrier as the native programs': one word per rank, everybody polls all.
        mine = self._rank * _CACHE_LINE_WORDS
        epoch = self._arrived[mine] + 1
        self._arrived[mine] = epoch
        for other in self._others:
            at = other * _CACHE_LINE_WORDS
            polls = 0
            while self._arrived[at] < epoch:
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

    def _exchange(self) -> None:
        self._peer.exchange()
        if self._touch:
            for source in self._others:
                self._peer.view(source).sum()

    def _one_shot(self) -> float:
        self._stamp()
        self._barrier()
        start = time.perf_counter()
        self._exchange()
        elapsed = time.perf_counter() - start
        self._check_stamps()
        self._peer.release()
        return elapsed

    def _train(self, length: int) -> float:
        self._stamp()
        self._barrier()
        start = time.perf_counter()
        for _ in range(length - 1):
            self._exchange()
            self._peer.release()
        self._exchange()
        elapsed = time.perf_counter() - start
        self._check_stamps()
        self._peer.release()
        return elapsed / length

    def _stamp_of(self, source: int, destination: int) -> int:
        return self._round * 1_000_003 + source * 101 + destination + 1

    def _stamp(self) -> None:
        self._round += 1
        for to in self._others:
            self._peer.outgoing[to][0] = self._stamp_of(self._rank, to)
            self._peer.outgoing[to][-1] = self._stamp_of(self._rank, to)

    def _check_stamps(self) -> None:
        for source in self._others:
            view, expected = self._peer.view(source), self._stamp_of(source, self._rank)
            if int(view[0]) != expected or int(view[-1]) != expected:
                raise RuntimeError(f"message from rank {source} differs from what it sent")

    def _verify_every_word(self) -> None:
        self._round += 1
        for to in self._others:
            torch.arange(len(self._peer.outgoing[to]), out=self._peer.outgoing[to])
            self._peer.outgoing[to].add_(self._stamp_of(self._rank, to))
        self._peer.exchange()
        for source in self._others:
            view = self._peer.view(source)
            expected = torch.arange(len(view)) + self._stamp_of(source, self._rank)
            if not torch.equal(view, expected):
                raise RuntimeError(f"message from rank {source} differs from what it sent")
        self._peer.release()


def _serve(rank: int, world: int, store: str, shared: Any, tasks: Connection) -> None:
    pin_to_core(rank)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    group = dist.group.WORLD
    assert group is not None
    tasks.send(True)
    while (task := tasks.recv()) is not None:
        name, size, touch, method, argument = task
        try:
            peer = PEERS[name](group, size)
            measurement = _Measurement(peer, rank, world, shared, touch)
            tasks.send(getattr(measurement, method)(argument))
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
        self._store = tempfile.TemporaryDirectory(prefix="bls-alltoall-")
        shared = context.RawValue(_Shared)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            mine, theirs = context.Pipe()
            store = str(Path(self._store.name) / "store")
            process = context.Process(
                target=_serve, args=(rank, world, store, shared, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        # Whoever measures something else first would measure how these start.
        for rank in range(world):
            self._answer(rank)

    def measure(self, peer: str, size: int, seconds: float, touch: bool) -> dict[str, Any]:
        """Runs one of PEERS; the result has the native programs' form."""
        answers = self._ask(peer, size, touch, "run", seconds)
        return {
            kind: _summarize([a[kind] for a in answers], length)
            for kind, length in (("one_shot", 1), ("train", answers[0]["length"]))
        }

    def repeat(self, peer: str, size: int, repetitions: int) -> float:
        """One train of `repetitions` calls: microseconds a call of the slowest rank."""
        return 1e6 * max(self._ask(peer, size, False, "repeat", repetitions))

    def _ask(self, *task: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(task)
        return [self._answer(rank) for rank in range(len(self._pipes))]

    def _answer(self, rank: int) -> Any:
        if not self._pipes[rank].poll(_LIMIT_SECONDS):
            raise RuntimeError(f"rank {rank} gave no result within {_LIMIT_SECONDS} s")
        answer = self._pipes[rank].recv()
        if isinstance(answer, str):
            raise RuntimeError(f"rank {rank} failed:\n{answer}")
        return answer

    def __enter__(self) -> Ranks:
        """Gives the ranks themselves."""
        return self

    def __exit__(self, *failure: object) -> None:
        """Ends the processes: when asked normally, at once after a failure."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if failure[0] is not None:
                process.kill()
            elif process.is_alive():
                pipe.send(None)
        for process in self._processes:
            process.join()
        self._store.cleanup()


def _summarize(seconds: Sequence[Sequence[float]], length: int) -> dict[str, Any]:
    slowest = spread([1e6 * max(sample) for sample in zip(*seconds, strict=True)])
    return {
        "samples": slowest["samples"],
        "length": length,
        "q1_us": slowest["q1"],
        "median_us": slowest["median"],
        "q3_us": slowest["q3"],
    }

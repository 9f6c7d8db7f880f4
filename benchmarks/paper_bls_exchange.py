"""Exchanges with a window under random delays, or with messages of random sizes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from delays_ranks import rotated, timed
from delays_sleep import computed_ideal, run_window
from dlrm_plain.exchange import Start, over
from paper_bls_mpi import MpiBackend
from tqdm import tqdm

from torchrec_bls import BLSOptions, BoundedLagChannel

_SEED = 11
_HEADER_ROOM = 256
_DEADLINE = 60.0

#: (steps, source, destination), in words of 8 bytes.
Words = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ExchangeSettings:
    """What is measured with sleeps for compute.

    Attributes:
        bounds: bounds of the exchanges.
        steps: steps of a run.
        runs: runs of each exchange at each bound.
        max_delay: each rank is late by 0 to this before each post, seconds.
        dense: sleep for the dense part, seconds.
        kib: smallest and largest message, KiB; sizes are drawn for each step and pair of ranks.
    """

    bounds: tuple[int, ...]
    steps: int
    runs: int
    max_delay: float
    dense: float
    kib: tuple[int, int]


def measure(stage: str, given: dict[str, Any], mpi: MpiBackend | None) -> list[dict[str, Any]]:
    """Runs on every rank; one entry for each exchange and bound, with the ms per step of the runs.

    "shm" and "c10d" are channels of these transports, read in place; "gloo", "bls" and "mpi" are
    asynchronous all-to-alls of a backend, which copy into the caller's memory.
    """
    settings = ExchangeSettings(**given)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    random = np.random.default_rng([_SEED, ranks])
    delays = random.uniform(0, settings.max_delay, (ranks, settings.steps))
    low, high = settings.kib
    words = 128 * random.integers(low, high, (settings.steps, ranks, ranks), endpoint=True)
    words[:, range(ranks), range(ranks)] = 0  # nobody moves a rank's own block
    exchanges = {bound: _exchanges(rank, words, bound, mpi) for bound in settings.bounds}
    names = list(exchanges[settings.bounds[0]])
    times: dict[tuple[str, int], list[float]] = {}
    total = settings.runs * len(settings.bounds) * len(names)
    with tqdm(total=total, disable=rank != 0, desc=stage, unit="run") as bar:
        for run in range(settings.runs):
            for bound in settings.bounds:
                for name in rotated(names, run):
                    exchange = exchanges[bound][name]
                    run_window(exchange, [0.0] * (2 * bound + 2), 0.0, bound)
                    own = delays[rank].tolist()
                    work = partial(run_window, exchange, own, settings.dense, bound)
                    times.setdefault((name, bound), []).append(timed(work, settings.steps).elapsed)
                    bar.update()
    for of_bound in exchanges.values():
        for exchange in of_bound.values():
            exchange.close()
    return [
        {
            "peer": name,
            "bound": bound,
            "computed_ideal_ms": 1e3 * computed_ideal(delays, settings.dense, bound),
            "ms_per_step": runs,
        }
        for (name, bound), runs in times.items()
    ]


def _exchanges(
    rank: int, words: Words, bound: int, mpi: MpiBackend | None
) -> dict[str, _ChannelExchange | _TorchExchange]:
    world = dist.group.WORLD
    assert world is not None
    slot_bytes = 8 * int(words.max()) + _HEADER_ROOM
    options = BLSOptions(bound=bound, slot_bytes=slot_bytes, deadline=_DEADLINE)
    starts = {
        "gloo": over(dist.new_group(backend="gloo")),
        "bls": over(dist.new_group(backend="bls", pg_options=options)),
    }
    if mpi is not None:
        starts["mpi"] = mpi.start
    return {
        **{
            transport: _ChannelExchange(
                rank,
                words,
                BoundedLagChannel(
                    world,
                    bound=bound,
                    slot_bytes=slot_bytes,
                    transport=transport,
                    deadline=_DEADLINE,
                    name=f"{transport}, bound {bound}",
                ),
            )
            for transport in ("shm", "c10d")
        },
        **{name: _TorchExchange(rank, words, bound, start) for name, start in starts.items()},
    }


class _Exchange:
    """The last word of every message says step and source, and is checked on arrival."""

    def __init__(self, rank: int, words: Words) -> None:
        self._rank = rank
        self._words = words
        self._others = [other for other in range(words.shape[1]) if other != rank]

    def _check(self, message: torch.Tensor, step: int, source: int) -> None:
        expected = (step, source, int(self._words[step, source, self._rank]))
        if (found := (*divmod(int(message[-1]), 1000), len(message))) != expected:
            raise RuntimeError(f"got (step, source, words) {found}, expected {expected}")


class _ChannelExchange(_Exchange):
    def __init__(self, rank: int, words: Words, channel: BoundedLagChannel) -> None:
        super().__init__(rank, words)
        self._channel = channel
        self._messages = torch.zeros(words.shape[1], int(words.max()), dtype=torch.int64)

    def post(self, step: int) -> None:
        parts: list[list[torch.Tensor]] = [[] for _ in self._messages]
        for to in self._others:
            message = self._messages[to, : self._words[step, self._rank, to]]
            message[-1] = 1000 * step + self._rank
            parts[to] = [message]
        self._channel.post(parts)

    def complete(self, step: int) -> None:
        self._arrival = self._channel.wait()
        for source in self._others:
            self._check(self._arrival.tensor(source, 0, torch.int64), step, source)

    def release(self) -> None:
        self._arrival.release()

    def close(self) -> None:
        pulled = self._channel.stats().pulled_messages
        self._channel.close()
        if pulled:
            raise RuntimeError(f"{pulled} messages did not fit into their slots")


class _TorchExchange(_Exchange):
    def __init__(self, rank: int, words: Words, bound: int, start: Start) -> None:
        super().__init__(rank, words)
        self._start = start
        most = (bound + 1, int(words.sum(axis=2).max())), (bound + 1, int(words.sum(axis=1).max()))
        self._sent, self._received = (torch.zeros(shape, dtype=torch.int64) for shape in most)
        self._under_way: deque[Any] = deque()

    def post(self, step: int) -> None:
        buffer = step % len(self._sent)
        sends = self._words[step, self._rank].tolist()
        receives = self._words[step, :, self._rank].tolist()
        sent = self._sent[buffer, : sum(sends)]
        for message in sent.split(sends):
            if len(message):
                message[-1] = 1000 * step + self._rank
        received = self._received[buffer, : sum(receives)]
        self._under_way.append((self._start(received, sent, receives, sends), received, receives))

    def complete(self, step: int) -> None:
        work, received, receives = self._under_way.popleft()
        work.wait()
        for source, message in enumerate(received.split(receives)):
            if source != self._rank:
                self._check(message, step, source)

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass

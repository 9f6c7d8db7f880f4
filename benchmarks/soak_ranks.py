"""The soak itself: runs of many iterations, each with a channel and a bound of its own."""

from __future__ import annotations

import json
import random
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from soak_messages import LARGEST, Messages, Outbox
from soak_resources import Resources, growth, largest, resources
from tqdm import tqdm

from torchrec_bls import BoundedLagChannel
from torchrec_bls.processes import run

_DEADLINE_S = 4 * 3600.0


@dataclass(frozen=True)
class SoakSettings:
    """How long and what.

    Attributes:
        ranks: processes.
        iterations: of each rank in all runs.
        seconds: end after the run that is under way by then; None for all iterations.
        run_iterations: iterations of one run, which has one channel.
        bounds: a run draws one of them.
        delay_every: a rank sleeps before one post in so many, on average.
        max_delay: seconds; the sleeps are uniform up to it.
        seed: of bounds, sizes, bytes and delays.
    """

    ranks: int = 8
    iterations: int = 1_000_000
    seconds: float | None = None
    run_iterations: int = 5_000
    bounds: tuple[int, ...] = (0, 1, 2, 3, 4, 8)
    delay_every: int = 1000
    max_delay: float = 0.002
    seed: int = 1


def soak(folder: Path, settings: SoakSettings) -> dict[str, Any]:
    """Runs the ranks in processes of their own and returns what they counted.

    Raises:
        RanksFailedError: a byte was wrong or a rank failed; the text has the first one's traceback.
    """
    run(settings.ranks, _rank, folder, settings, deadline_s=_DEADLINE_S, start_method="spawn")
    ranks = [json.loads(_result_path(folder, rank).read_text()) for rank in range(settings.ranks)]
    common = {name: ranks[0][name] for name in ("seconds", "iterations", "bounds")}
    return {**common, "ranks": [rank["own"] for rank in ranks]}


def _result_path(folder: Path, rank: int) -> Path:
    return folder / f"result-of-rank-{rank}.json"


def _rank(rank: int, folder: Path, settings: SoakSettings) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*larger messages are pulled")
    dist.init_process_group(
        "gloo",
        init_method=(folder / "rendezvous").as_uri(),
        rank=rank,
        world_size=settings.ranks,
    )
    result = _Soak(rank, settings).run_all()
    _result_path(folder, rank).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


class _Soak:
    """One rank."""

    def __init__(self, rank: int, settings: SoakSettings) -> None:
        self._rank = rank
        self._settings = settings
        self._messages = Messages(settings.seed)
        self._outboxes = [Outbox(settings.ranks) for _ in range(max(settings.bounds) + 1)]
        self._delays = random.Random(settings.seed * settings.ranks + rank)
        self._next_delay = self._draw_distance()
        self._done = 0
        self._checked = 0
        self._pulled = 0
        self._growth: list[Resources] = []
        self._progress = tqdm(
            total=None if settings.seconds else settings.iterations,
            unit=" iterations",
            disable=rank != 0,
            mininterval=1,
        )

    def run_all(self) -> dict[str, Any]:
        """Runs until the iterations or the seconds are over."""
        settings = self._settings
        bounds, closed = [], []
        draw = random.Random(settings.seed)
        started = time.monotonic()
        while self._done < settings.iterations and not self._is_over(started):
            bounds.append(draw.choice(settings.bounds))
            self._run(bounds[-1], min(settings.run_iterations, settings.iterations - self._done))
            closed.append(resources())
        self._progress.close()
        own = {
            "messages_checked": self._checked,
            "pulled_messages": self._pulled,
            # By then every bound's memory has been in use.
            "first": closed[len(closed) // 10],
            "last": closed[-1],
            "largest_growth_within_run": largest(self._growth),
        }
        seconds = time.monotonic() - started
        return {"seconds": seconds, "iterations": self._done, "bounds": bounds, "own": own}

    def _is_over(self, started: float) -> bool:
        """Rank 0's clock decides for all."""
        if self._settings.seconds is None:
            return False
        over = torch.tensor(time.monotonic() - started >= self._settings.seconds)
        dist.broadcast(over, 0)
        return bool(over)

    def _run(self, bound: int, iterations: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        first = self._done
        last = first + iterations
        with BoundedLagChannel(group, bound=bound, slot_bytes=LARGEST + 64) as channel:
            early = resources()
            for iteration in range(first, last + bound):
                if iteration == first + iterations // 10:
                    early = resources()
                if iteration < last:
                    self._delay()
                    self._post(channel, iteration)
                if iteration - bound >= first:
                    self._complete(channel, iteration - bound)
                    self._progress.update()
            self._growth.append(growth(early, resources()))
            self._pulled += channel.stats().pulled_messages
        self._done += iterations

    def _post(self, channel: BoundedLagChannel, iteration: int) -> None:
        outbox = self._outboxes[iteration % (channel.bound + 1)]
        channel.post(
            [
                [outbox.fill(peer, self._messages.between(iteration, self._rank, peer))]
                for peer in range(self._settings.ranks)
            ]
        )

    def _complete(self, channel: BoundedLagChannel, iteration: int) -> None:
        with channel.wait() as arrival:
            for peer in range(self._settings.ranks):
                expected = self._messages.between(iteration, peer, self._rank)
                parts = arrival.parts(peer)
                if len(parts) != 1 or bytes(parts[0]) != expected:
                    raise AssertionError(
                        f"rank {self._rank}: iteration {iteration} from rank {peer} has "
                        f"{[bytes(part).hex() for part in parts]} instead of {expected.hex()}"
                    )
                self._checked += peer != self._rank

    def _delay(self) -> None:
        self._next_delay -= 1
        if self._next_delay == 0:
            time.sleep(self._delays.uniform(0, self._settings.max_delay))
            self._next_delay = self._draw_distance()

    def _draw_distance(self) -> int:
        return self._delays.randint(1, 2 * self._settings.delay_every)

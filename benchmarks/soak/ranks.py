"""The soak itself: runs of many iterations, each with a channel and a bound of its own."""

import gc
import random
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.harness.launch import gathered, on_ranks
from benchmarks.soak.messages import LARGEST, OVERSIZED, Messages
from torchrec_bls import BoundedLagChannel

#: Ranks; iterations of each in all runs; seconds after which no run is begun, None for all
#: iterations; iterations of a run, which has one channel; bounds, of which a run draws one; a rank
#: sleeps before one post in `delay_every` on average, uniformly up to `max_delay` seconds; seed of
#: bounds, sizes, bytes and delays.
SETTINGS: dict[str, Any] = {
    **{"ranks": 8, "iterations": 1_000_000, "seconds": None, "run_iterations": 5_000},
    **{"bounds": (0, 1, 2, 3, 4, 8), "delay_every": 1000, "max_delay": 0.002, "seed": 1},
}

Resources = dict[str, int]


def soak(settings: dict[str, Any]) -> dict[str, Any]:
    """Runs the ranks in processes of their own and returns what they counted; raises if a byte was
    wrong or a rank failed, with the first one's traceback."""
    results: dict[str, Any] = on_ranks(settings["ranks"], _soak, settings)
    return results


def _soak(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    warnings.filterwarnings("ignore", message=".*larger messages are pulled")
    common, own = _Soak(rank, settings).run_all()
    return {**common, "ranks": gathered(own)}


def _resources() -> Resources:
    """Resident memory in KiB, private and shared, and open descriptors of this process."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "private_kib": int(status["RssAnon"].split()[0]),
        "shared_kib": int(status["RssShmem"].split()[0]),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


class _Soak:
    """One rank."""

    def __init__(self, rank: int, settings: dict[str, Any]) -> None:
        self._rank = rank
        self._peers = range(settings["ranks"])
        self._settings = settings
        self._messages = Messages(settings["seed"])
        # Memory for the messages of each post that is under way.
        shape = (max(settings["bounds"]) + 1, settings["ranks"], OVERSIZED)
        self._outboxes = torch.empty(shape, dtype=torch.uint8)
        self._delays = random.Random(settings["seed"] * settings["ranks"] + rank)
        self._next_delay = self._draw_distance()
        self._done = self._checked = self._pulled = 0
        self._growth: list[Resources] = []
        total = None if settings["seconds"] else settings["iterations"]
        self._progress = tqdm(total=total, unit=" iterations", disable=rank != 0, mininterval=1)

    def run_all(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Runs until the iterations or the seconds are over: what is common, and this rank's."""
        settings = self._settings
        bounds, closed = [], []
        draw = random.Random(settings["seed"])
        started = time.monotonic()
        while self._done < settings["iterations"] and not self._is_over(started):
            bounds.append(draw.choice(settings["bounds"]))
            left = settings["iterations"] - self._done
            self._run(bounds[-1], min(settings["run_iterations"], left))
            closed.append(_resources())
        self._progress.close()
        seconds = time.monotonic() - started
        return {"seconds": seconds, "iterations": self._done, "bounds": bounds}, {
            "messages_checked": self._checked,
            "pulled_messages": self._pulled,
            # By then every bound's memory has been in use.
            "first": closed[len(closed) // 10],
            "last": closed[-1],
            "largest_growth_within_run": {
                name: max(run[name] for run in self._growth) for name in self._growth[0]
            },
        }

    def _is_over(self, started: float) -> bool:
        """Rank 0's clock decides for all."""
        if self._settings["seconds"] is None:
            return False
        over = torch.tensor(time.monotonic() - started >= self._settings["seconds"])
        dist.broadcast(over, 0)
        return bool(over)

    def _run(self, bound: int, iterations: int) -> None:
        first, last = self._done, self._done + iterations
        with BoundedLagChannel(dist.group.WORLD, bound=bound, slot_bytes=LARGEST + 64) as channel:
            for iteration in range(first, last + bound):
                if iteration in (first, first + iterations // 10):
                    early = _resources()
                if iteration < last:
                    self._delay()
                    self._post(channel, iteration)
                if iteration - bound >= first:
                    self._complete(channel, iteration - bound)
                    self._progress.update()
            late = _resources()
            self._growth.append({name: late[name] - early[name] for name in early})
            self._pulled += channel.stats().pulled_messages
        self._done += iterations

    def _post(self, channel: BoundedLagChannel, iteration: int) -> None:
        outbox = self._outboxes[iteration % (channel.bound + 1)]
        parts = []
        for peer, memory in zip(self._peers, outbox, strict=True):
            message = self._messages.between(iteration, self._rank, peer)
            memoryview(memory.numpy())[: len(message)] = message
            parts.append([memory[: len(message)]])
        channel.post(parts)

    def _complete(self, channel: BoundedLagChannel, iteration: int) -> None:
        with channel.wait() as arrival:
            for peer in self._peers:
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
            time.sleep(self._delays.uniform(0, self._settings["max_delay"]))
            self._next_delay = self._draw_distance()

    def _draw_distance(self) -> int:
        return self._delays.randint(1, 2 * self._settings["delay_every"])

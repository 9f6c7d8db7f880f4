"""What the ranks of the delay benchmark share: joining, a common start, sums over the runs."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from common import spread

from torchrec_bls.processes import run

_SEED = 7
# For all ranks to hear of the common start before it comes.
_START_SECONDS = 0.05
_RESULTS = "results.json"
_DEADLINE_S = 3600.0


@dataclass(frozen=True)
class SleepSettings:
    """What is measured with the dense part as a sleep.

    Attributes:
        ranks: process counts.
        bounds: bounds of the exchanges.
        steps: steps of a run of an exchange.
        forward_steps: steps of a run of a sharded module, at most `steps`.
        rounds: runs of each exchange at each bound.
        max_delay: upper end of the drawn delays, seconds.
        dense: length of the sleep that stands for the dense part, seconds.
    """

    ranks: tuple[int, ...]
    bounds: tuple[int, ...]
    steps: int
    forward_steps: int
    rounds: int
    max_delay: float = 0.010
    dense: float = 0.005

    def delays(self, ranks: int) -> npt.NDArray[np.float64]:
        """The (ranks, steps) delays in seconds, the same in every run (BLS paper, sec. V-E2)."""
        random = np.random.default_rng([_SEED, ranks])
        return random.uniform(0, self.max_delay, (ranks, self.steps))


@dataclass(frozen=True)
class RunTime:
    """One run, ms per step.

    Attributes:
        elapsed: from the common start to the slowest rank's end.
        cpu: CPU time of a rank with all its threads, mean of the ranks.
    """

    elapsed: float
    cpu: float


def in_processes(work: Callable[..., None], ranks: int, *arguments: Any) -> list[dict[str, Any]]:
    """Runs `work(rank, folder, ranks, *arguments)` on every rank; returns what rank 0 leaves."""
    with tempfile.TemporaryDirectory(prefix="bls-delays-") as folder:
        run(
            ranks,
            work,
            Path(folder),
            ranks,
            *arguments,
            deadline_s=_DEADLINE_S,
            start_method="spawn",
        )
        results: list[dict[str, Any]] = json.loads((Path(folder) / _RESULTS).read_text())
    return results


def join(rank: int, folder: Path, ranks: int) -> dist.ProcessGroup:
    """Joins this process in a gloo group."""
    torch.set_num_threads(1)
    store = (folder / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    return group


def leave(rank: int, folder: Path, results: list[dict[str, Any]]) -> None:
    """Leaves rank 0's results in `folder`, and the group."""
    if rank == 0:
        (folder / _RESULTS).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def timed(work: Callable[[], None], steps: int) -> RunTime:
    """Runs `work`, which has `steps` steps, from the same moment on all ranks."""
    start = torch.tensor(time.monotonic() + _START_SECONDS, dtype=torch.float64)
    dist.broadcast(start, 0)
    time.sleep(max(0.0, start.item() - time.monotonic()))
    cpu = time.process_time()
    work()
    slowest = torch.tensor(time.monotonic() - start.item(), dtype=torch.float64)
    mean_cpu = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(mean_cpu)
    return RunTime(
        elapsed=1e3 * slowest.item() / steps,
        cpu=1e3 * mean_cpu.item() / dist.get_world_size() / steps,
    )


def rotated(names: Iterable[str], turn: int) -> list[str]:
    """Another order in each turn, so that nobody always runs right after the same other."""
    order = list(names)
    return order[turn % len(order) :] + order[: turn % len(order)]


def summary(times: dict[str, list[RunTime]], reference: str) -> dict[str, Any]:
    """Spreads over the rounds, and the ratios to `reference` within a round."""
    base = times[reference]
    return {
        "ms_per_step": {n: spread([run.elapsed for run in runs]) for n, runs in times.items()},
        "cpu_ms_per_step": {n: spread([run.cpu for run in runs]) for n, runs in times.items()},
        "ratio": {
            n: spread([a.elapsed / b.elapsed for a, b in zip(runs, base, strict=True)])
            for n, runs in times.items()
            if n != reference
        },
    }

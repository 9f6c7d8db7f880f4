"""Runs in changing order, under the same random delays, from the same moment on all ranks."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.delays.exchanges import Exchange, Words
from benchmarks.harness.launch import gathered, rotated, slowest
from torchrec_bls.observe import ideal_finish_times

# For all ranks to hear of the common start before it comes.
_START_SECONDS = 0.05
# Steps; the window of the largest bound, 8, is filled twice.
_WARM_UP = 18

Case, Result = TypeVar("Case"), TypeVar("Result")
#: By name, of each run: ms a step to the slowest rank's end, and CPU ms a step of a rank with all
#: its threads.
Times = Mapping[str, Sequence[tuple[float, float]]]


def draw_delays(seed: int, ranks: int, steps: int, longest: float) -> npt.NDArray[np.float64]:
    """Seconds by (rank, step), the same in every run (BLS paper, sec. V-E2)."""
    return np.random.default_rng([seed, ranks]).uniform(0, longest, (ranks, steps))


def in_turn(
    cases: Mapping[int, Mapping[str, Case]], runs: int, title: str, once: Callable[[Case], Result]
) -> dict[int, dict[str, list[Result]]]:
    """Calls `once` with all cases of a bound in changing order; the results of all runs by case."""
    results: Any = {bound: {name: [] for name in named} for bound, named in cases.items()}
    turns = list(product(range(runs), cases))
    for run, bound in tqdm(turns, disable=dist.get_rank() != 0, desc=title, unit="bound"):
        for name in rotated(cases[bound], run):
            results[bound][name].append(once(cases[bound][name]))
    return results


def timed(
    work: Callable[[Sequence[float], float], None], delays: Sequence[float], dense: float
) -> tuple[float, float]:
    """What `Times` has of a run of `work`, which takes this rank's delays and the dense part's."""
    # Untimed: memory and connections are used for the first time here.
    work([0.0] * min(_WARM_UP, len(delays)), 0.0)
    start, cpu = common_start(), time.process_time()
    work(delays, dense)
    elapsed = slowest(time.monotonic() - start)
    mean_cpu = fmean(gathered(time.process_time() - cpu))
    return 1e3 * elapsed / len(delays), 1e3 * mean_cpu / len(delays)


def measure_windows(
    settings: dict[str, Any],
    seed: int,
    make: Callable[[Words, int], Mapping[str, Exchange]],
    title: str,
) -> Iterator[tuple[int, float, Times]]:
    """Runs exchanges on every rank; yields each bound, its ideal in ms a step, and the times.

    `make` makes the exchanges of a bound, by name. `settings` have `bounds`; `steps` of a run;
    `runs`; `max_delay` of a rank before each post and the sleep `dense`, seconds; smallest and
    largest message `kib`, drawn by step and pair.
    """
    ranks, steps, dense = dist.get_world_size(), settings["steps"], settings["dense"]
    delays = draw_delays(seed, ranks, steps, settings["max_delay"])
    own = delays[dist.get_rank()].tolist()
    low, high = settings["kib"]
    random = np.random.default_rng([seed, ranks, low])
    words = 128 * random.integers(low, high, (steps, ranks, ranks), endpoint=True)
    words[:, range(ranks), range(ranks)] = 0  # nobody moves a rank's own block
    exchanges = {bound: make(words, bound) for bound in settings["bounds"]}
    times = in_turn(exchanges, settings["runs"], title, lambda one: timed(one.run, own, dense))
    for bound, of_bound in exchanges.items():
        for exchange in of_bound.values():
            exchange.close()
        # With exact sleeps and a free exchange, by recurrence. The dense part of step t comes in
        # step t + bound, and in the end `bound` steps without delay and post empty the window.
        before = np.pad(delays, ((0, 0), (0, bound)))
        after = np.pad(np.full_like(delays, dense), ((0, 0), (bound, 0)))
        ideal = ideal_finish_times(before, bound, after)[:, -1].max()
        yield bound, 1e3 * float(ideal) / steps, times[bound]


def common_start() -> float:
    """Sleeps until a moment that all ranks share, and returns it, in `time.monotonic`'s seconds."""
    start = torch.tensor(time.monotonic() + _START_SECONDS, dtype=torch.float64)
    dist.broadcast(start, 0)
    sleep_until(start.item())
    return start.item()


def sleep_until(moment: float) -> None:
    """Sleeps until `moment`, in `time.monotonic`'s seconds."""
    time.sleep(max(0.0, moment - time.monotonic()))

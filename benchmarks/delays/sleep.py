"""Random delays with the dense part as a sleep: what the exchange itself adds to the ideal."""

import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from dlrm_plain.exchange import over
from tqdm import tqdm

from benchmarks.delays.exchanges import (
    ChannelExchange,
    Counters,
    Exchange,
    FreeExchange,
    TorchExchange,
)
from benchmarks.harness.launch import on_ranks, rotated, slowest
from benchmarks.harness.statistics import Spread
from benchmarks.modules.models import Case, Forward, build, ids_of
from torchrec_bls.observe import ideal_finish_times

#: What 8 ranks with 128 samples each send for 26 tables of dimension 64 in fp32.
PAIR_KIB = 104

_SEED = 7
_FORWARD_BATCH = 512
# For all ranks to hear of the common start before it comes.
_START_SECONDS = 0.05

#: Of each run: ms a step to the slowest rank's end, and CPU ms a step of a rank with all threads.
Times = dict[str, list[tuple[float, float]]]
Delays = npt.NDArray[np.float64]


def measure_exchanges(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The ideal, the channel and gloo at every bound; one entry for each (ranks, bound)."""
    results: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    for ranks in settings["ranks"]:
        counters = [
            [[context.Semaphore(0) for _ in range(ranks)] for _ in range(ranks)]
            for _ in settings["bounds"]
        ]
        results += on_ranks(ranks, _exchanges_on_rank, ranks, settings, counters)
    return results


def measure_forwards(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """A sharded EmbeddingBagCollection at bound 0, TorchRec on gloo and ours; one entry a ranks."""
    return [on_ranks(ranks, _forwards_on_rank, ranks, settings) for ranks in settings["ranks"]]


def draw_delays(seed: int, ranks: int, steps: int, longest: float) -> Delays:
    """Seconds by (rank, step), the same in every run (BLS paper, sec. V-E2)."""
    return np.random.default_rng([seed, ranks]).uniform(0, longest, (ranks, steps))


def measure_windows(
    exchanges: dict[int, dict[str, Exchange]], delays: Delays, dense: float, runs: int, title: str
) -> dict[int, Times]:
    """Runs all exchanges at all bounds in changing order and closes them; the times by bound.

    Args:
        exchanges: of this rank, by bound and name.
        delays: (ranks, steps), seconds.
        dense: sleep for the dense part, seconds.
        runs: of each exchange at each bound.
        title: of the progress bar.
    """
    rank, steps = dist.get_rank(), delays.shape[1]
    own = delays[rank].tolist()
    times: dict[int, Times] = {bound: defaultdict(list) for bound in exchanges}
    total = runs * sum(map(len, exchanges.values()))
    with tqdm(total=total, disable=rank != 0, desc=title, unit="run") as bar:
        for run in range(runs):
            for bound, by_name in exchanges.items():
                for name in rotated(by_name, run):
                    # Untimed: memory and connections are used for the first time here.
                    run_window(by_name[name], [0.0] * min(2 * bound + 2, steps), 0.0, bound)
                    work = partial(run_window, by_name[name], own, dense, bound)
                    times[bound][name].append(timed(work, steps))
                    bar.update()
    for by_name in exchanges.values():
        for exchange in by_name.values():
            exchange.close()
    return times


def computed_ideal(delays: Delays, dense: float, bound: int) -> float:
    """Milliseconds per step of a free exchange with exact sleeps, by recurrence.

    The dense part of step t comes in step t + bound, and in the end `bound` steps without delay
    and post empty the window. `delays` (ranks, steps) and `dense` are in seconds.
    """
    ranks, steps = delays.shape
    before = np.concatenate([delays, np.zeros((ranks, bound))], axis=1)
    after = np.full_like(before, dense)
    after[:, :bound] = 0.0
    finish = ideal_finish_times(before, bound, after)
    return 1e3 * float(finish[:, -1].max()) / steps


def run_window(exchange: Exchange, delays: Sequence[float], dense: float, bound: int) -> None:
    """Runs one rank: per step the delay, the post, then step - bound's wait and dense part."""
    steps = len(delays)
    for step in range(steps + bound):
        if step < steps:
            time.sleep(delays[step])
            exchange.post(step)
        if step >= bound:
            exchange.complete(step - bound)
            time.sleep(dense)
            exchange.release()


def timed(work: Callable[[], None], steps: int) -> tuple[float, float]:
    """Runs `work`, which has `steps` steps, from the same moment on all ranks, see `Times`."""
    start = torch.tensor(time.monotonic() + _START_SECONDS, dtype=torch.float64)
    dist.broadcast(start, 0)
    time.sleep(max(0.0, start.item() - time.monotonic()))
    cpu = time.process_time()
    work()
    elapsed = slowest(time.monotonic() - start.item())
    mean_cpu = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
    dist.all_reduce(mean_cpu)
    return 1e3 * elapsed / steps, 1e3 * mean_cpu.item() / dist.get_world_size() / steps


def _exchanges_on_rank(
    rank: int, ranks: int, settings: dict[str, Any], counters: list[Counters]
) -> list[dict[str, Any]]:
    delays = draw_delays(_SEED, ranks, settings["steps"], settings["max_delay"])
    words = np.full((settings["steps"], ranks, ranks), 128 * PAIR_KIB)
    words[:, range(ranks), range(ranks)] = 0
    gloo = over(dist.new_group(backend="gloo"))
    exchanges: dict[int, dict[str, Exchange]] = {}
    for bound, of_bound in zip(settings["bounds"], counters, strict=True):
        exchanges[bound] = {
            "ideal": FreeExchange(rank, words, of_bound),
            "channel": ChannelExchange(rank, words, bound),
            "gloo": TorchExchange(rank, words, bound, gloo),
        }
    dense = settings["dense"]
    times = measure_windows(exchanges, delays, dense, settings["rounds"], f"sleep, {ranks} ranks")
    return [
        {
            "ranks": ranks,
            "bound": bound,
            "computed_ideal_ms": computed_ideal(delays, dense, bound),
            **_summary(peers, "ideal"),
        }
        for bound, peers in times.items()
    ]


def _forwards_on_rank(rank: int, ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    delays = draw_delays(_SEED, ranks, settings["steps"], settings["max_delay"])
    own = delays[rank, : settings["forward_steps"]].tolist()
    case = Case("EBC", "table_wise", ranks, _FORWARD_BATCH)
    times: Times = defaultdict(list)
    with torch.no_grad():
        theirs, ours, _ = build(case, ids_of(case, rank))
        forwards = {"torchrec": theirs, "ours": ours}
        for turn in tqdm(range(settings["rounds"]), disable=rank != 0, desc=f"EBC, {ranks} ranks"):
            for name in rotated(forwards, turn):
                _run_forward(forwards[name], [0.0] * 3, 0.0)
                work = partial(_run_forward, forwards[name], own, settings["dense"])
                times[name].append(timed(work, len(own)))
    return {"ranks": ranks, "batch": _FORWARD_BATCH, **_summary(times, "torchrec")}


def _run_forward(forward: Forward, delays: Sequence[float], dense: float) -> None:
    for delay in delays:
        time.sleep(delay)
        forward()
        time.sleep(dense)


def _summary(times: Times, reference: str) -> dict[str, Any]:
    """Spreads over the rounds, and the ratios to `reference` within a round."""
    elapsed = {name: [ms for ms, _ in runs] for name, runs in times.items()}
    return {
        "ms_per_step": {name: Spread(ms) for name, ms in elapsed.items()},
        "cpu_ms_per_step": {n: Spread([cpu for _, cpu in runs]) for n, runs in times.items()},
        "ratio": {
            name: Spread([a / b for a, b in zip(ms, elapsed[reference], strict=True)])
            for name, ms in elapsed.items()
            if name != reference
        },
    }

"""Random delays with the dense part as a sleep: what the exchange itself adds to the ideal."""

from __future__ import annotations

import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from delays_peers import ChannelExchange, Counters, Exchange, FreeExchange, GlooExchange
from delays_ranks import RunTime, SleepSettings, in_processes, join, leave, rotated, summary, timed
from embedding_models import Case, Forward, build, ids_of
from tqdm import tqdm

from torchrec_bls.observe import ideal_finish_times

_FORWARD_BATCH = 512


def measure_exchanges(settings: SleepSettings) -> list[dict[str, Any]]:
    """The ideal, the channel and gloo at every bound; one entry for each (ranks, bound)."""
    results: list[dict[str, Any]] = []
    for ranks in settings.ranks:
        context = multiprocessing.get_context("spawn")
        counters = [[context.Semaphore(0) for _ in range(ranks)] for _ in range(ranks)]
        results += in_processes(_exchanges_on_rank, ranks, settings, counters)
    return results


def measure_forwards(settings: SleepSettings) -> list[dict[str, Any]]:
    """A sharded EmbeddingBagCollection at bound 0, TorchRec on gloo and ours; one entry a ranks."""
    results: list[dict[str, Any]] = []
    for ranks in settings.ranks:
        results += in_processes(_forwards_on_rank, ranks, settings)
    return results


def computed_ideal(delays: npt.NDArray[np.float64], dense: float, bound: int) -> float:
    """Seconds per step of a free exchange with exact sleeps, by recurrence.

    The dense part of step t comes in step t + bound, and in the end `bound` steps without delay
    and post empty the window.

    Args:
        delays: (ranks, steps), seconds.
        dense: seconds.
        bound: the bound k.
    """
    ranks, steps = len(delays), len(delays[0])
    before = np.concatenate([delays, np.zeros((ranks, bound))], axis=1)
    after = np.full_like(before, dense)
    after[:, :bound] = 0.0
    finish = ideal_finish_times(before, bound, after)
    return float(finish[:, -1].max()) / steps


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


def run_forward(forward: Forward, delays: Sequence[float], dense: float) -> None:
    """Runs one rank: per step the delay, the module's forward, the dense part."""
    for delay in delays:
        time.sleep(delay)
        forward()
        time.sleep(dense)


def _exchanges_on_rank(
    rank: int, folder: Path, ranks: int, settings: SleepSettings, counters: Counters
) -> None:
    group = join(rank, folder, ranks)
    delays = settings.delays(ranks)
    own_delays = delays[rank].tolist()
    makers: dict[str, Callable[[int], Exchange]] = {
        "ideal": lambda bound: FreeExchange(rank, counters, bound),
        "channel": lambda bound: ChannelExchange(group, bound),
        "gloo": lambda bound: GlooExchange(group, bound),
    }
    times: dict[int, dict[str, list[RunTime]]] = {k: defaultdict(list) for k in settings.bounds}
    total = settings.rounds * len(settings.bounds) * len(makers)
    with tqdm(total=total, disable=rank != 0, desc=f"sleep, {ranks} ranks", unit="run") as bar:
        for turn in range(settings.rounds):
            for bound in settings.bounds:
                for name in rotated(makers, turn):
                    exchange = makers[name](bound)
                    # Untimed: memory and connections are used for the first time here.
                    run_window(exchange, [0.0] * (2 * bound + 2), 0.0, bound)
                    work = partial(run_window, exchange, own_delays, settings.dense, bound)
                    times[bound][name].append(timed(work, settings.steps))
                    exchange.close()
                    bar.update()
    results = [
        {
            "ranks": ranks,
            "bound": bound,
            "computed_ideal_ms": 1e3 * computed_ideal(delays, settings.dense, bound),
            **summary(peers, "ideal"),
        }
        for bound, peers in times.items()
    ]
    leave(rank, folder, results)


def _forwards_on_rank(rank: int, folder: Path, ranks: int, settings: SleepSettings) -> None:
    join(rank, folder, ranks)
    delays = settings.delays(ranks)[rank, : settings.forward_steps].tolist()
    case = Case("EBC", "table_wise", ranks, _FORWARD_BATCH)
    times: dict[str, list[RunTime]] = defaultdict(list)
    with torch.no_grad():
        theirs, ours, _ = build(case, ids_of(case, rank))
        forwards = {"torchrec": theirs, "ours": ours}
        total = settings.rounds * len(forwards)
        with tqdm(total=total, disable=rank != 0, desc=f"EBC, {ranks} ranks", unit="run") as bar:
            for turn in range(settings.rounds):
                for name in rotated(forwards, turn):
                    run_forward(forwards[name], [0.0] * 3, 0.0)
                    work = partial(run_forward, forwards[name], delays, settings.dense)
                    times[name].append(timed(work, len(delays)))
                    bar.update()
    leave(rank, folder, [{"ranks": ranks, "batch": _FORWARD_BATCH, **summary(times, "torchrec")}])

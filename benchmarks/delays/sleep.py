"""Random delays with the dense part as a sleep: what the exchange itself adds to the ideal."""

import multiprocessing
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from dlrm_plain.exchange import over

from benchmarks.delays.exchanges import Backend, Channel, Counters, Exchange, Free, Words
from benchmarks.delays.runs import Times, draw_delays, in_turn, measure_windows, timed
from benchmarks.harness.launch import on_ranks
from benchmarks.harness.statistics import Spread
from benchmarks.modules.models import Case, Forward, build, ids_of

#: What 8 ranks with 128 samples each send for 26 tables of dimension 64 in fp32.
PAIR_KIB = 104

_SEED = 7
_FORWARD_BATCH = 512


def measure_exchanges(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The ideal, the channel and gloo at every bound; one entry for each (ranks, bound)."""
    results: list[dict[str, Any]] = []
    semaphore = partial(multiprocessing.get_context("spawn").Semaphore, 0)
    for ranks in settings["ranks"]:
        counters = [[semaphore() for _ in range(ranks)] for _ in range(ranks)]
        results += on_ranks(ranks, _exchanges_on_rank, ranks, settings, counters)
    return results


def measure_forwards(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """A sharded EmbeddingBagCollection at bound 0, TorchRec on gloo and ours; one entry a ranks."""
    return [on_ranks(ranks, _forwards_on_rank, ranks, settings) for ranks in settings["ranks"]]


def _exchanges_on_rank(
    rank: int, ranks: int, settings: dict[str, Any], counters: Counters
) -> list[dict[str, Any]]:
    gloo = over(dist.new_group(backend="gloo"))

    def make(words: Words, bound: int) -> dict[str, Exchange]:
        return {
            "ideal": Free(words, bound, counters),
            "channel": Channel(words, bound),
            "gloo": Backend(words, bound, gloo),
        }

    settings = {**settings, "runs": settings["rounds"], "kib": (PAIR_KIB, PAIR_KIB)}
    measured = measure_windows(settings, _SEED, make, f"sleep, {ranks} ranks")
    return [
        {"ranks": ranks, "bound": bound, "computed_ideal_ms": ideal, **_summary(times, "ideal")}
        for bound, ideal, times in measured
    ]


def _forwards_on_rank(rank: int, ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    delays = draw_delays(_SEED, ranks, settings["steps"], settings["max_delay"])
    own = delays[rank, : settings["forward_steps"]].tolist()
    case = Case("EBC", "table_wise", ranks, _FORWARD_BATCH)

    def run(forward: Forward, delays: Sequence[float], dense: float) -> None:
        for delay in delays:
            time.sleep(delay)
            forward()
            time.sleep(dense)

    def once(forward: Forward) -> tuple[float, float]:
        return timed(partial(run, forward), own, settings["dense"])

    with torch.no_grad():
        theirs, ours, _ = build(case, ids_of(case, rank))
        forwards = {0: {"torchrec": theirs, "ours": ours}}
        times = in_turn(forwards, settings["rounds"], f"EBC, {ranks} ranks", once)[0]
    return {"ranks": ranks, "batch": _FORWARD_BATCH, **_summary(times, "torchrec")}


def _summary(times: Times, reference: str) -> dict[str, Any]:
    """Spreads over the rounds, and the ratios to `reference` within a round."""
    elapsed, cpu = ({name: np.array(runs)[:, of] for name, runs in times.items()} for of in (0, 1))
    ratios = {name: ms / elapsed[reference] for name, ms in elapsed.items() if name != reference}
    return {
        "ms_per_step": {name: Spread(ms) for name, ms in elapsed.items()},
        "cpu_ms_per_step": {name: Spread(ms) for name, ms in cpu.items()},
        "ratio": {name: Spread(ratio) for name, ratio in ratios.items()},
    }

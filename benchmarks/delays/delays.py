"""Steps under random delays and uneven work, by the bound: the BLS paper's Fig. 7 on one host."""

import json
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from dlrm_plain.exchange import over

from benchmarks.delays.exchanges import (
    PAIR_KIB,
    Backend,
    Channel,
    Counters,
    Exchange,
    Free,
    Times,
    Words,
    draw_delays,
    measure_windows,
    timed,
)
from benchmarks.delays.page import section
from benchmarks.demo.measure import MEASURED, measure
from benchmarks.demo.run import deadline_s, make_variants, parse_arguments
from benchmarks.demo.settings import Settings
from benchmarks.demo.summary import summarize
from benchmarks.harness import record
from benchmarks.harness.launch import on_ranks
from benchmarks.harness.statistics import Spread, taking_turns
from benchmarks.modules.models import Case, Forward, Modules
from torchrec_bls.processes import run

SLEEP = {"ranks": (4, 8), "bounds": (0, 1, 2, 4, 8), "steps": 200, "forward_steps": 60, "rounds": 3}
SLEEP |= {"max_delay": 0.010, "dense": 0.005}
QUICK = {"ranks": (4,), "bounds": (0, 2), "steps": 50, "forward_steps": 15, "rounds": 2}
# The synthetic settings of the BLS paper, sec. V-E. Random delays and Criteo's one id a table are
# what the demo runs; with 1 to 100 ids ranks differ in lookups and message sizes.
DELAYS, _ = parse_arguments([])
HETEROGENEOUS = replace(DELAYS, bounds=(0, 1, 2, 4), steps=30, max_delay=0.0, max_ids_per_table=100)

_SEED = 7
_FORWARD_BATCH = 512
# Pooled sums of row-wise tables have more than one term only with several ids a table, and the
# order in which gloo adds them up may differ.
_TOLERANCE = 1e-4


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

    def steps(forward: Forward, delays: Sequence[float], dense: float) -> None:
        for delay in delays:
            time.sleep(delay)
            forward()
            time.sleep(dense)

    with torch.no_grad():
        forwards = Modules(case).forwards(case, rank)
        runs = {
            name: partial(timed, partial(steps, forwards[name](0)), own, settings["dense"])
            for name in ("torchrec", "ours")
        }
        times = taking_turns(runs, settings["rounds"], f"EBC, {ranks} ranks")
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


def measure_dlrm(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs the demo's measurement with its `Settings`; one entry for each line of its table."""
    of_demo = Settings(**settings)
    with tempfile.TemporaryDirectory(prefix="bls-delays-") as name:
        folder = Path(name)
        ranks = {"deadline_s": deadline_s(of_demo), "start_method": "spawn"}
        run(of_demo.ranks, measure, folder, of_demo, make_variants, **ranks)
        entries = json.loads((folder / MEASURED).read_text())
    return [_result(entry, exact=of_demo.max_ids_per_table == 1) for entry in entries]


def _result(entry: dict[str, Any], *, exact: bool) -> dict[str, Any]:
    line = summarize(entry)
    equal = line.equals_torchrec if exact else line.max_difference < _TOLERANCE
    if not (equal and line.equals_first_bound):
        raise RuntimeError(f"logits differ from TorchRec's or the first bound's: {line}")
    runs = zip(*(rank["times"] for rank in entry["ranks"]), strict=True)
    steps = len(entry["ranks"][0]["times"][0]["slept"]) - 1
    per_step = [1e3 * fmean(times["total"] for times in run) / steps for run in runs]
    return {**asdict(line), "ms_per_step": Spread(per_step)}


def main() -> None:
    names = ("sleep", "forward", "heterogeneous", "dlrm")
    parser = record.parser(__doc__, quick="4 ranks, bounds 0 and 2, short runs")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="default: all")
    arguments = parser.parse_args()
    sleep, delays, heterogeneous = SLEEP, DELAYS, HETEROGENEOUS
    if arguments.quick:
        sleep = SLEEP | QUICK
        delays = replace(DELAYS, bounds=(0, 2), steps=20, runs=2)
        heterogeneous = replace(HETEROGENEOUS, bounds=(0, 2), steps=6, runs=2)
    parts = {
        "sleep": (measure_exchanges, sleep),
        "forward": (measure_forwards, sleep),
        "heterogeneous": (measure_dlrm, asdict(heterogeneous)),
        "dlrm": (measure_dlrm, asdict(delays)),
    }
    before = record.environment()
    settings = {part: parts[part][1] for part in arguments.parts}
    results = {part: parts[part][0](settings[part]) for part in arguments.parts}
    record.publish(arguments.json, "delays", before, settings, results, section)


if __name__ == "__main__":
    main()

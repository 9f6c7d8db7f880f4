"""Steps of ranks that read tables directly while others are delayed, slow, stopped or killed."""

import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy import stats

from benchmarks.direct.page import faults_section
from benchmarks.harness import record
from benchmarks.harness.launch import IMPORTED_ONCE
from benchmarks.harness.statistics import Spread
from benchmarks.modules.models import KINDS, Case, ids_of, sharded
from torchrec_bls import BLSConfig
from torchrec_bls.processes import outcomes

CASE = Case("EBC", "row_wise", ranks=4, batch=128)
# Windows come in pairs, without the fault and with it; a rank that was killed stays away.
FULL = {"rows": 50_000, "dense_ms": 5.0, "steps": 100, "pairs": 20, "starts_of_killed": 4}
QUICK = {"rows": 1_000, "dense_ms": 5.0, "steps": 10, "pairs": 2, "starts_of_killed": 1}
# The ranks that are struck; the others are measured.
FAULTS = {"delays": (1, 2, 3), "slow": (3,), "stopped": (3,), "killed": (3,)}
# The others are sleeps. Most of the time goes by until the ranks have their models.
QUICK_FAULTS = ("stopped", "killed")

_VICTIM = 3
_WARM_UP = 50  # steps
_BATCHES = 20  # that a rank takes turns with
_LEAST = 5  # steps at the begin of a window, which others may still change in
_MAX_DELAY_S = 0.010
_TIMES_SLOWER = 10
_END = -1
_DEADLINE_S = 3600.0


def measure(fault: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The healthy ranks' steps in windows without the fault and with it."""
    starts = settings["starts_of_killed"] if fault == "killed" else 1
    pairs = settings["pairs"] // starts
    without: list[list[float]] = []
    with_fault: list[list[float]] = []
    for _ in range(starts):
        for steps in _measure_once(fault, settings, pairs):
            for window in range(pairs):
                last = fault == "killed"
                without.append(steps[window if last else 2 * window])
                with_fault.append(steps[pairs + window if last else 2 * window + 1])
    return {
        "fault": fault,
        "steps": sum(map(len, with_fault)),
        "ms": Spread(np.concatenate(without)),
        "ms_with_fault": Spread(np.concatenate(with_fault)),
        "mean": _ratio(np.mean, without, with_fault),
        "p99": _ratio(lambda steps: np.quantile(steps, 0.99), without, with_fault),
    }


def _ratio(of: Any, without: list[list[float]], with_fault: list[list[float]]) -> tuple[float, ...]:
    """Low end, ratio and high end of its 95 % interval by bootstrap over pairs of windows."""

    def ratio(pairs: Any) -> float:
        before, after = ([w[i] for i in pairs] for w in (without, with_fault))
        return float(of(np.concatenate(after)) / of(np.concatenate(before)))

    every = np.arange(len(without))
    found = stats.bootstrap(
        (every,), ratio, n_resamples=2000, method="percentile", vectorized=False, rng=0
    ).confidence_interval
    return float(found.low), ratio(every), float(found.high)


def _measure_once(fault: str, settings: dict[str, Any], pairs: int) -> list[list[list[float]]]:
    """Of each healthy rank, the ms of the steps in each window."""
    with tempfile.TemporaryDirectory(prefix="bls-faults-") as folder:
        path = Path(folder) / "window"
        np.zeros(1, np.int64).tofile(path)
        ended = outcomes(
            CASE.ranks,
            _steps_on_rank,
            *(fault, settings, pairs, path),
            deadline_s=_DEADLINE_S,
            backend="gloo",
            preload=IMPORTED_ONCE,
        )
    expected = [None] * _VICTIM + ["ProcessDied" if fault == "killed" else None]
    if [each.error for each in ended] != expected:
        raise RuntimeError("\n".join(map(str, ended)))
    return [each.value for each in ended if each.rank not in FAULTS[fault]]


def _steps_on_rank(
    rank: int, fault: str, settings: dict[str, Any], pairs: int, path: Path
) -> list[list[float]]:
    window = np.memmap(path, np.int64, "r+")
    case = CASE._replace(rows=settings["rows"])
    batches = [ids_of(case, rank, seed) for seed in range(_BATCHES)]
    _, _, _, sharder = KINDS[case.module]
    with torch.no_grad():
        exchange = sharded(case, sharder(config=BLSConfig()), dist.group.WORLD)
        expected = [exchange(ids).wait().values().clone() for ids in batches]
        module = sharded(
            case, sharder(config=BLSConfig(lookup="direct")), dist.group.WORLD, "direct"
        )
        for number in range(_WARM_UP):
            module(batches[number % _BATCHES]).wait()
        pids: list[int] = [0] * case.ranks
        dist.all_gather_object(pids, os.getpid())
        driver = _Windows(window, settings, pairs, fault, pids[_VICTIM]) if rank == 0 else None
        steps: list[list[float]] = [[] for _ in range(2 * pairs)]
        draw, number = random.Random(rank), 0
        while window[0] != _END:
            at = int(window[0])
            struck = rank in FAULTS[fault] and at % 2 == 1
            slept = settings["dense_ms"] / 1e3
            if struck and fault == "slow":
                slept *= _TIMES_SLOWER
            if struck and fault == "delays":
                slept += draw.uniform(0, _MAX_DELAY_S)
            begin = time.perf_counter()
            embeddings = module(batches[number % _BATCHES]).wait().values()
            time.sleep(slept)
            took = time.perf_counter() - begin
            if not torch.equal(embeddings, expected[number % _BATCHES]):
                raise RuntimeError(f"rank {rank} has a wrong answer at step {number}")
            if window[0] == at:
                steps[at].append(took * 1e3)
            number += 1
            if driver is not None:
                driver.after_step(len(steps[at]))
    return [each[_LEAST:] for each in steps]


class _Windows:
    """Goes from window to window as rank 0 steps, and stops or kills the victim."""

    def __init__(
        self, window: Any, settings: dict[str, Any], pairs: int, fault: str, pid: int
    ) -> None:
        self._window = window
        self._steps = settings["steps"] + _LEAST
        self._pairs = pairs
        self._fault = fault
        self._pid = pid

    def after_step(self, steps: int) -> None:
        if steps < self._steps:
            return
        following = int(self._window[0]) + 1
        if self._fault == "stopped":
            os.kill(self._pid, signal.SIGSTOP if following % 2 else signal.SIGCONT)
        elif self._fault == "killed" and following == self._pairs:
            os.kill(self._pid, signal.SIGKILL)
        self._window[0] = following if following < 2 * self._pairs else _END


def main() -> None:
    parser = record.parser(__doc__, quick="two faults, few steps, small tables")
    arguments = parser.parse_args()
    settings: dict[str, Any] = QUICK if arguments.quick else FULL
    before = record.environment()
    faults = QUICK_FAULTS if arguments.quick else FAULTS
    results = [measure(fault, settings) for fault in faults]
    record.publish(arguments.json, "direct_faults", before, settings, results, faults_section)


if __name__ == "__main__":
    main()

"""Time to find equal ids: random and log-uniform ones, and ids that an unkeyed hash puts side by
side. With another build of the native module, the ratio of both, in turns in one run."""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.harness.statistics import geometric_mean, ratio_of_medians, taking_turns

COUNTS = [500, 2048, 12_500, 100_000, 400_000]
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # of the hash before it had a key


def _random(draw: np.random.Generator, count: int) -> Any:
    return draw.integers(0, 10_000_000, count)


def _log_uniform(draw: np.random.Generator, count: int) -> Any:
    return (1e6 ** draw.random(count)).astype(np.int64) - 1


def _chosen(_: np.random.Generator, count: int) -> Any:
    ids = np.arange(32 * count, dtype=np.uint64)
    return ids[np.argsort(ids * _FACTOR)[:count]].astype(np.int64)


KINDS = {"random": _random, "log-uniform": _log_uniform, "chosen": _chosen}


def nanoseconds(module: str | None, kinds: list[str], seed: int) -> dict[str, float]:
    """Median time for an id of each cell, with new ids in each call."""
    if module is None:
        from torchrec_bls import _native as native
    else:
        found = importlib.util.spec_from_file_location("torchrec_bls._native", module)
        assert found is not None and found.loader is not None
        native = importlib.util.module_from_spec(found)
        found.loader.exec_module(native)
    draw = np.random.default_rng(seed)
    times = {}
    for kind in kinds:
        for count in COUNTS:
            of_cell = []
            for _ in range(max(5, 200_000 // count)):
                ids = KINDS[kind](draw, count)
                begin = time.perf_counter_ns()
                native.EqualBags(None, torch.from_numpy(ids), [(count, count, True)])
                of_cell.append((time.perf_counter_ns() - begin) / count)
            times[f"{kind} {count}"] = float(np.median(of_cell))
    return times


def _in_a_process(module: str | None, kinds: list[str]) -> Callable[[], dict[str, float]]:
    arguments = [*(["--old", module] if module else []), "--worker", *kinds]
    command = [sys.executable, "-m", "benchmarks.codecs.equal_ids", *arguments]

    def call() -> dict[str, float]:
        times: dict[str, float] = json.loads(subprocess.check_output(command, text=True))
        return times

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", help="_native.*.so of another build, which takes tensors too")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(nanoseconds(options.old, options.worker, seed=0)))
        return
    times = nanoseconds(None, list(KINDS), seed=0)
    for count in COUNTS:
        ratio = times[f"chosen {count}"] / times[f"random {count}"]
        print(f"{count} ids: chosen ones take {ratio:.2f} of the time of random ones")
    if options.old is None:
        return
    kinds = ["random", "log-uniform"]  # chosen ones would take the old hash minutes
    turns = taking_turns(
        {"new": _in_a_process(None, kinds), "old": _in_a_process(options.old, kinds)},
        options.turns,
    )
    ratios = []
    for cell in turns["new"][0]:
        new, old = ([turn[cell] for turn in turns[name]] for name in ("new", "old"))
        low, ratio, high = ratio_of_medians(new, old)
        ratios.append(ratio)
        print(
            f"{cell}: {np.median(new):.2f} ns an id, new by old {ratio:.3f} ({low:.3f}-{high:.3f})"
        )
    print(f"geometric mean {geometric_mean(ratios)[1]:.3f}")


if __name__ == "__main__":
    main()

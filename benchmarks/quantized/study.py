"""Tables 2, 3 and 4 of Quantized Collectives: what quantized messages cost a DLRM in accuracy.

A study that was stopped goes on where it was.
"""

import argparse
import ctypes
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm

from benchmarks.harness import record
from benchmarks.quantized.cells import BASELINE, CELLS, Cell
from benchmarks.quantized.data import Source, load
from benchmarks.quantized.dlrm import DLRM, Training
from benchmarks.quantized.page import plot, section, summarize
from torchrec_bls.datasets.planted import Clicks, bayes_loss

# Nine tenths of the time are for the planted clicks.
ITERATIONS = 112
SEEDS = 4
BATCH_SIZE = 1024
WORKERS = 2  # processes of one thread
TEST_ROWS = 1 << 16
# A batch of the 2,000 rows of criteo-tiny; a sample for each of 128 nodes.
SMALL_BATCH = 128
# Cells of many nodes cost the most, and small sets tell little about them.
MOST_NODES = {"ml-100k": 32, "criteo-tiny": 1}
_TEST_BATCH = 1024
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def sources(options: argparse.Namespace) -> list[Source]:
    if options.quick:
        return [Source("planted", 2, SMALL_BATCH, 4096, 100)]
    iterations, rows = max(1, round(ITERATIONS * options.scale)), options.table_rows
    found = [Source("planted", iterations, BATCH_SIZE, TEST_ROWS, rows)]
    real = {
        "ml-100k": (BATCH_SIZE, options.data / "ml-100k"),
        "criteo-tiny": (SMALL_BATCH, options.data / "criteo-tiny" / "train.csv"),
        "criteo": (BATCH_SIZE, options.criteo),
    }
    for name, (batch_size, path) in real.items():
        if path and path.exists():
            found.append(Source(name, iterations, batch_size, 0, rows, path))
    return found


def train(source: Source, cell: Cell, seed: int) -> dict[str, Any]:
    """Trains a cell with the weights and samples of a seed, and tests it without quantization.

    The baseline's result says what is known of the test set, others how their decisions differ from
    the baseline's. Names that end with "_on_labels" go by the labels, the others by the probability
    that a decision is right, where that is known.
    """
    torch.set_num_threads(1)
    begin = time.process_time()
    test = load(source, seed).test
    losses, logits = _fit(source, cell, seed)
    loss = binary_cross_entropy_with_logits(logits, torch.from_numpy(test.labels)).item()
    # A run that has diverged decides for no click: NaN is not above 0.
    clicks = (logits > 0).numpy()
    right = _right(clicks, test)
    result = {
        "source": source.name,
        "cell": cell.key,
        "seed": seed,
        **{f"accuracy{by}": _mean(probabilities) for by, probabilities in right.items()},
        "loss": _finite(loss),
        "training_losses": [_finite(loss) for loss in losses[:: max(1, len(losses) // 16)]],
        "iterations": len(losses),
        "test_rows": len(test),
        "cpu_seconds": round(time.process_time() - begin, 2),
    }
    if cell == BASELINE:
        result["click_rate"] = _mean(test.labels)
        if test.probability is not None:
            result["bayes_loss"] = bayes_loss(test.probability)
            result["bayes_accuracy"] = _mean(np.maximum(test.probability, 1 - test.probability))
        return result
    of_baseline = (_logits_of_baseline(source, seed) > 0).numpy()
    result["flipped"] = _mean(clicks != of_baseline)
    for by, baseline in _right(of_baseline, test).items():
        difference = right[by] - baseline
        result[f"difference{by}"] = _mean(difference)
        result[f"test_error{by}"] = float(difference.std() / math.sqrt(len(difference)))
    return result


def _fit(source: Source, cell: Cell, seed: int) -> tuple[list[float], torch.Tensor]:
    """Trains, and returns the loss of each iteration and the logits of the test set."""
    split = load(source, seed)
    model = DLRM(split.rows_per_table, seed=seed)
    training = Training(model, cell.collectives)
    losses = [training.step(*batch) for batch in _batches(split.train, source.batch_size)]
    with torch.no_grad():
        batches = _batches(split.test, _TEST_BATCH)
        logits = [model(dense, model.look_up(ids)) for dense, ids, _ in batches]
    return losses, torch.cat(logits)


# Cells of one seed follow each other. Each worker trains their baseline, which is the cheapest.
@lru_cache(maxsize=1)
def _logits_of_baseline(source: Source, seed: int) -> torch.Tensor:
    return _fit(source, BASELINE, seed)[1]


def _batches(clicks: Clicks, size: int) -> Iterator[list[torch.Tensor]]:
    """Dense features, ids and labels of one batch after the other."""
    for first in range(0, len(clicks), size):
        batch = clicks.rows(first, first + size)
        yield [torch.from_numpy(part) for part in (batch.dense, batch.ids, batch.labels)]


def _right(clicks: npt.NDArray[np.bool_], test: Clicks) -> dict[str, npt.NDArray[np.float64]]:
    """How probably each decision is right, by the end of the names that go by it."""
    known = test.labels if test.probability is None else test.probability
    of_click = {"": known, "_on_labels": test.labels}
    return {by: np.where(clicks, p, 1 - p).astype(np.float64) for by, p in of_click.items()}


def _mean(values: npt.NDArray[Any]) -> float:
    return float(values.mean(dtype=np.float64))


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def run(study: record.Resumable, tasks: list[tuple[Source, Cell, int]], workers: int) -> None:
    """Trains what is not in the record yet."""
    done = {(each["source"], each["cell"], each["seed"]) for each in study.raw["results"]}
    left = [task for task in tasks if (task[0].name, task[1].key, task[2]) not in done]
    # One BLAS thread a worker from the start: they share the cores among themselves.
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _end_with_parent) as pool:
        running = [pool.submit(train, *task) for task in left]
        try:
            for finished in tqdm(as_completed(running), "cells", len(running), mininterval=1):
                study.add(finished.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _end_with_parent() -> None:
    """Makes a worker end when the study is killed, instead of training on."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    parser = record.parser(__doc__, quick="two iterations, one seed, 32 nodes")
    parser.set_defaults(json=Path("out/study-quantized.json"))
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder of ml-100k, criteo-tiny"
    )
    parser.add_argument("--criteo", type=Path, help="train.txt of Criteo's challenge")
    parser.add_argument("--scale", type=float, default=1.0, help="times the iterations")
    parser.add_argument("--table-rows", type=int, default=10_000, help="of a table at most")
    options = parser.parse_args()
    if options.criteo is not None and not options.criteo.exists():
        parser.error(f"--criteo {options.criteo}: there is no such file")
    found = sources(options)
    seeds = 1 if options.quick else SEEDS
    tasks = [
        (source, cell, seed)
        for source in found
        for seed in range(seeds)
        for cell in CELLS
        if cell.collectives.nodes <= (32 if options.quick else MOST_NODES.get(source.name, 128))
    ]
    # Where a set lies does not change what is found in it.
    of_sources = [{k: v for k, v in asdict(each).items() if k != "path"} for each in found]
    empty = {"benchmark": "quantized", "environment": record.environment()}
    empty |= {"settings": {"seeds": seeds, "sources": of_sources}, "results": []}
    run(record.Resumable(options.json, empty, summarize), tasks, WORKERS)
    summary = record.read(options.json)
    print(section(summary))
    plot(options.json.with_suffix(".png"), summary)


if __name__ == "__main__":
    main()

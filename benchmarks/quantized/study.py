"""Tables 2, 3 and 4 of Quantized Collectives: what quantized messages cost a DLRM in accuracy.

A study that was stopped goes on where it was.
"""

import argparse
import ctypes
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from benchmarks.harness import record
from benchmarks.quantized.cells import CELLS, Cell
from benchmarks.quantized.data import Source
from benchmarks.quantized.page import plot, section
from benchmarks.quantized.summary import summarize
from benchmarks.quantized.training import train

# Nine tenths of the time are for the planted clicks.
ITERATIONS = 112
SEEDS = 4
BATCH_SIZE = 1024
TEST_ROWS = 1 << 16
# A batch of the 2,000 rows of criteo-tiny; a sample for each of 128 nodes.
SMALL_BATCH = 128
# Cells of many nodes cost the most, and small sets tell little about them.
MOST_NODES = {"ml-100k": 32, "criteo-tiny": 1}
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def sources(options: argparse.Namespace) -> list[Source]:
    """Returns the sets of samples that are there."""
    if options.quick:
        return [Source("planted", 2, SMALL_BATCH, 4096, 100)]
    iterations, rows = max(1, round(ITERATIONS * options.scale)), options.table_rows
    found = [Source("planted", iterations, BATCH_SIZE, TEST_ROWS, rows)]
    movielens, sample = options.data / "ml-100k", options.data / "criteo-tiny" / "train.csv"
    if movielens.is_dir():
        found.append(Source("ml-100k", iterations, BATCH_SIZE, 0, rows, movielens))
    if sample.is_file():
        found.append(Source("criteo-tiny", iterations, SMALL_BATCH, 0, rows, sample))
    if options.criteo is not None:
        found.append(Source("criteo", iterations, BATCH_SIZE, 0, rows, options.criteo))
    return found


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
    """Runs the study."""
    parser = record.parser(__doc__, quick="two iterations, one seed, 32 nodes")
    parser.set_defaults(json=Path("out/study-quantized.json"))
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder of ml-100k, criteo-tiny"
    )
    parser.add_argument("--criteo", type=Path, help="train.txt of Criteo's challenge")
    parser.add_argument("--scale", type=float, default=1.0, help="times the iterations")
    parser.add_argument("--table-rows", type=int, default=10_000, help="of a table at most")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread")
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
    try:
        study = record.Resumable(options.json, empty, summarize)
    except record.RecordError as error:
        raise SystemExit(str(error)) from None
    run(study, tasks, options.workers)
    summary = record.read(options.json)
    print(section(summary))
    plot(options.json.with_suffix(".png"), summary)


if __name__ == "__main__":
    main()

"""What studies of accuracy share: they train a DLRM in many ways, their cells, and compare each
with a baseline of the same weights and samples. One that was stopped goes on where it was."""

import argparse
import ctypes
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
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
from benchmarks.harness.record import Record
from benchmarks.quantized.data import Source, load
from benchmarks.quantized.planted_clicks import Clicks, bayes_loss

TEST_ROWS = 1 << 16
# A batch of the 2,000 rows of criteo-tiny; a sample for each of 128 nodes.
SMALL_BATCH = 128
TEST_BATCH = 1024
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_OF_TEST_SET = ("iterations", "test_rows", "click_rate", "bayes_accuracy", "bayes_loss")

#: A source, a cell, which has a `key`, and a seed.
Task = tuple[Source, Any, int]
#: Trains a task; returns what its result has beside the accuracy, and the logits of the test set.
Fit = Callable[[Source, Any, int], tuple[Record, torch.Tensor]]


def parser(name: str, doc: str | None, quick: str, table_rows: int) -> argparse.ArgumentParser:
    """The command line that studies share."""
    made = record.parser(doc, quick)
    made.set_defaults(json=Path(f"out/study-{name}.json"))
    made.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder of ml-100k, criteo-tiny"
    )
    made.add_argument("--criteo", type=Path, help="train.txt of Criteo's challenge")
    made.add_argument("--scale", type=float, default=1.0, help="times the iterations")
    made.add_argument("--table-rows", type=int, default=table_rows, help="of a table at most")
    made.add_argument("--workers", type=int, default=2, help="processes of one thread")
    return made


def sources(
    options: argparse.Namespace, iterations: int, batch_size: int, own_tests: bool = False
) -> list[Source]:
    """The sets that are there. The one that was asked for has to be."""
    if options.criteo is not None and not options.criteo.exists():
        raise SystemExit(f"--criteo {options.criteo}: there is no such file")
    if options.quick:
        return [Source("planted", 2, SMALL_BATCH, 4096, 100)]
    iterations, rows = max(1, round(iterations * options.scale)), options.table_rows
    found = [Source("planted", iterations, batch_size, TEST_ROWS, rows, None, own_tests)]
    real = {
        "ml-100k": (batch_size, options.data / "ml-100k"),
        "criteo-tiny": (SMALL_BATCH, options.data / "criteo-tiny" / "train.csv"),
        "criteo": (batch_size, options.criteo),
    }
    for name, (size, path) in real.items():
        if path and path.exists():
            found.append(Source(name, iterations, size, 0, rows, path))
    return found


def compared(fit: Fit, baseline: Any, source: Source, cell: Any, seed: int) -> Record:
    """Trains a cell with the weights and samples of a seed, and tests it.

    The baseline's result says what is known of the test set, others how their decisions differ from
    the baseline's. Names that end with "_on_labels" go by the labels, the others by the probability
    that a decision is right, where that is known.
    """
    torch.set_num_threads(1)
    begin = time.process_time()
    test = load(source, seed).test
    of_baseline = _baseline(fit, baseline, source, seed)
    facts, logits = of_baseline if cell == baseline else fit(source, cell, seed)
    loss = binary_cross_entropy_with_logits(logits, torch.from_numpy(test.labels)).item()
    # A run that has diverged decides for no click: NaN is not above 0.
    clicks = (logits > 0).numpy()
    right = _right(clicks, test)
    result = {
        "source": source.name,
        "cell": cell.key,
        "seed": seed,
        **{f"accuracy{by}": _mean(probabilities) for by, probabilities in right.items()},
        "loss": finite(loss),
        **facts,
        "test_rows": len(test),
        "cpu_seconds": round(time.process_time() - begin, 2),
    }
    if cell == baseline:
        result["click_rate"] = _mean(test.labels)
        if test.probability is not None:
            result["bayes_loss"] = bayes_loss(test.probability)
            result["bayes_accuracy"] = _mean(np.maximum(test.probability, 1 - test.probability))
        return result
    as_baseline = (of_baseline[1] > 0).numpy()
    result["flipped"] = _mean(clicks != as_baseline)
    for by, probabilities in _right(as_baseline, test).items():
        difference = right[by] - probabilities
        result[f"difference{by}"] = _mean(difference)
        result[f"test_error{by}"] = float(difference.std() / math.sqrt(len(difference)))
    return result


# Cells of one seed follow each other, and each worker trains their baseline.
@lru_cache(maxsize=1)
def _baseline(fit: Fit, baseline: Any, source: Source, seed: int) -> tuple[Record, torch.Tensor]:
    return fit(source, baseline, seed)


def batches(clicks: Clicks, size: int) -> Iterator[list[torch.Tensor]]:
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


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def settings(found: list[Source]) -> list[Record]:
    """The sources as a record has them: where a set lies does not change what is found in it."""
    return [
        {k: v for k, v in asdict(each).items() if k != "path" and v is not False} for each in found
    ]


def run(
    study: record.Resumable, tasks: list[Task], workers: int, work: Callable[..., Record]
) -> None:
    """Does `work` for the tasks that are not in the record yet, and writes its summary."""
    done = {(each["source"], each["cell"], each["seed"]) for each in study.raw["results"]}
    left = [task for task in tasks if (task[0].name, task[1].key, task[2]) not in done]
    # One BLAS thread a worker from the start: they share the cores among themselves.
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _end_with_parent) as pool:
        running = [pool.submit(work, *task) for task in left]
        try:
            for finished in tqdm(as_completed(running), "cells", len(running), mininterval=1):
                study.add(finished.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    study.write()


def _end_with_parent() -> None:
    """Makes a worker end when the study is killed, instead of training on."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def changes_by_source(raw: Record, baseline: str, control: str = "") -> list[Record]:
    """Each source's baseline and by cell its `change`; that of the control also by labels."""
    found = []
    for source in raw["settings"]["sources"]:
        trained = [e for e in raw["results"] if e["source"] == source["name"] and "accuracy" in e]
        bases = {each["seed"]: each for each in trained if each["cell"] == baseline}
        by_cell: dict[str, list[Record]] = {}
        for each in trained:
            if each["cell"] != baseline and each["seed"] in bases:
                by_cell.setdefault(each["cell"], []).append(each)
        if not bases:
            continue
        one = next(iter(bases.values()))
        of_source = {name: one[name] for name in _OF_TEST_SET if name in one}
        of_source |= {name: [b[name] for b in bases.values()] for name in ("accuracy", "loss")}
        changes = {cell: change(of_cell, bases) for cell, of_cell in by_cell.items()}
        if control in by_cell:
            changes["control on labels"] = change(by_cell[control], bases, "_on_labels")
        found.append({"source": source["name"], "baseline": of_source, "changes": changes})
    return found


def change(results: list[Record], bases: dict[int, Record], suffix: str = "") -> Record:
    """Changes of a cell against the baselines of the same seeds, in percent of these (equation 2 of
    Quantized Collectives).

    `results` has the cell's, one a seed, and `bases` the baselines' by seed. The suffix "" counts
    decisions by the probability that they are right, where that is known; "_on_labels" by labels.
    """
    of_bases = [bases[result["seed"]] for result in results]

    def of(name: str, them: list[Record] = results) -> np.ndarray:
        return np.array([each[name] for each in them], dtype=float)  # NaN for None

    accuracy = of(f"accuracy{suffix}", of_bases)
    changes = 100 * (of(f"difference{suffix}") / accuracy)
    spread = float(np.std(changes, ddof=1)) if len(results) > 1 else 0.0
    seed_error = spread / math.sqrt(len(results))
    test_error = float(np.mean(100 * (of(f"test_error{suffix}") / accuracy)))
    loss = float(np.mean(100 * (of("loss") / of("loss", of_bases) - 1)))
    return {
        "accuracy": float(np.mean(changes)),
        "spread": spread,  # standard deviation over the seeds, 0 with one
        "seed_error": seed_error,  # standard error of the mean because of the seeds
        "test_error": test_error,  # and of the finite test set, which is the same for all seeds
        "error": math.hypot(seed_error, test_error),
        # None if one was not finite, the baseline's included.
        "loss": finite(loss),
        "flipped": float(np.mean(100 * of("flipped"))),  # of the decisions, percent
        "seeds": len(results),
    }


def description(result: Record, batch: int) -> str:
    """What a source's trainings have in common."""
    base = result["baseline"]
    text = (
        f"{base['iterations']} iterations of {batch} samples, {base['test_rows']:,} samples to "
        f"test on, {len(base['accuracy'])} seeds. In full precision: {_range(base['accuracy'])} "
        f"right, loss {_range(base['loss'])}; deciding for no click is right for "
        f"{max(base['click_rate'], 1 - base['click_rate']):.4f}"
    )
    if "bayes_loss" in base:
        text += (
            f", a model that knows the probabilities for {base['bayes_accuracy']:.4f} with loss "
            f"{base['bayes_loss']:.4f}"
        )
    return f"{text}."


def _range(values: list[float | None]) -> str:
    if None in values:
        return "not finite for some seeds"
    return f"{min(values):.4f} to {max(values):.4f}"

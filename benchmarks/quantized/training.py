"""Trains one cell and compares it with the baseline of its seed."""

import math
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.quantized.cells import BASELINE, Cell
from benchmarks.quantized.data import Source, load
from benchmarks.quantized.dlrm import DLRM, Training
from torchrec_bls.datasets.planted import Clicks, bayes_loss

_TEST_BATCH = 1024


def train(source: Source, cell: Cell, seed: int) -> dict[str, Any]:
    """Trains a cell with the weights and samples of a seed, and tests it without quantization.

    Returns:
        accuracy and loss on the test set; with the baseline what is known of the set, with other
        cells how their decisions differ from the baseline's. Names that end with "_on_labels" go by
        the labels, the others by the probability that a decision is right, where that is known.
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

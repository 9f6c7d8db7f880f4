"""Trains one cell and compares it with the baseline of its seed."""

import base64
import math
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from benchmarks.quantized import data
from benchmarks.quantized.cells import Cell
from benchmarks.quantized.dlrm import DLRM, Training
from torchrec_bls.datasets import capped_cardinalities
from torchrec_bls.datasets.planted import Clicks, bayes_loss

_TEST_BATCH = 1024


@dataclass(frozen=True)
class Source:
    """Where samples come from, and how many of them are used.

    Attributes:
        name: "planted", "ml-100k", or the name of a Criteo file.
        iterations: of training at most.
        batch_size: of all nodes together.
        test_rows: of the planted model; real rows have a share for tests.
        table_rows: of a table at most, for hashed and generated ids.
        path: of the real rows.
    """

    name: str
    iterations: int
    batch_size: int
    test_rows: int
    table_rows: int
    path: str | None = None

    # Cells of one seed follow each other.
    @lru_cache(maxsize=1)  # noqa: B019  sources live as long as the process
    def load(self, seed: int) -> tuple[data.Split, list[int]]:
        """Returns the samples of a seed, and the rows of the tables."""
        train_rows = self.iterations * self.batch_size
        hashed = capped_cardinalities(self.table_rows)
        if self.path is None:
            split = data.planted(hashed, train_rows=train_rows, test_rows=self.test_rows, seed=seed)
            return split, hashed
        path = Path(self.path)
        sizes = {"train_rows": train_rows, "batch_size": self.batch_size}
        if path.is_dir():
            split = data.movielens(path, **sizes, seed=seed)
            tables = zip(data.rows_of(split.train), data.rows_of(split.test), strict=True)
            return split, [max(rows) for rows in tables]
        return data.criteo(path, hashed, **sizes), hashed


def train(source: Source, cell: Cell, seed: int, baseline: str | None) -> dict[str, Any]:
    """Trains a cell and tests it.

    Args:
        source: of the samples.
        cell: what is quantized.
        seed: of weights and samples.
        baseline: `decisions` of the baseline's result with the same source and seed; None for
            the baseline itself.

    Returns:
        accuracy and loss on the test set, and with a baseline what differs in the decisions.
    """
    torch.set_num_threads(1)
    begin = time.process_time()
    split, rows_per_table = source.load(seed)
    training = Training(DLRM(rows_per_table, seed=seed), cell.collectives)
    losses = []
    for first in range(0, len(split.train), source.batch_size):
        batch = split.train.rows(first, first + source.batch_size)
        losses.append(training.step(*map(torch.from_numpy, (batch.dense, batch.ids, batch.labels))))
    logits = predict(training.model, split.test)
    # A run that has diverged decides for no click.
    clicks = np.nan_to_num(logits, nan=-1.0) > 0
    result = {
        "source": source.name,
        "cell": cell.key,
        "seed": seed,
        "accuracy": _mean(_right(clicks, split.test)),
        "accuracy_on_labels": _mean(clicks == split.test.labels),
        "loss": _finite(_loss(logits, split.test.labels)),
        "training_losses": [_finite(loss) for loss in losses[:: max(1, len(losses) // 16)]],
        "iterations": len(losses),
        "test_rows": len(split.test),
        "cpu_seconds": round(time.process_time() - begin, 2),
    }
    if baseline is None:
        result["decisions"] = pack(clicks)
        result["click_rate"] = _mean(split.test.labels)
        if split.test.probability is not None:
            probability = split.test.probability
            result["bayes_loss"] = bayes_loss(probability)
            result["bayes_accuracy"] = _mean(np.maximum(probability, 1 - probability))
        return result
    of_baseline = unpack(baseline, len(clicks))
    differences = {
        "": _right(clicks, split.test) - _right(of_baseline, split.test),
        "_on_labels": 1.0 * (clicks == split.test.labels) - (of_baseline == split.test.labels),
    }
    result["flipped"] = _mean(clicks != of_baseline)
    for suffix, difference in differences.items():
        result[f"difference{suffix}"] = _mean(difference)
        result[f"test_error{suffix}"] = float(difference.std() / math.sqrt(len(difference)))
    return result


def predict(model: DLRM, clicks: Clicks) -> npt.NDArray[np.float32]:
    """Returns the logits of samples, in full precision."""
    logits = []
    with torch.no_grad():
        for first in range(0, len(clicks), _TEST_BATCH):
            batch = clicks.rows(first, first + _TEST_BATCH)
            rows = model.look_up(torch.from_numpy(batch.ids))
            logits.append(model(torch.from_numpy(batch.dense), rows))
    return torch.cat(logits).numpy()


def pack(decisions: npt.NDArray[np.bool_]) -> str:
    """Returns decisions as text."""
    return base64.b64encode(np.packbits(decisions).tobytes()).decode()


def unpack(text: str, count: int) -> npt.NDArray[np.bool_]:
    """Returns what `pack` was given."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=count).astype(bool)


def _right(clicks: npt.NDArray[np.bool_], test: Clicks) -> npt.NDArray[np.float64]:
    """Returns how probably each decision is right: 0 or 1 where only labels are known."""
    if test.probability is None:
        return (clicks == test.labels).astype(np.float64)
    return np.where(clicks, test.probability, 1 - test.probability).astype(np.float64)


def _loss(*both: npt.NDArray[np.float32]) -> float:
    """Of logits and labels."""
    return nn.functional.binary_cross_entropy_with_logits(*map(torch.from_numpy, both)).item()


def _mean(values: npt.NDArray[Any]) -> float:
    return float(values.mean(dtype=np.float64))


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None

"""Answers of a run, compared with what TorchRec computes from the version that each one names."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serve import model, shape
from benchmarks.serve.encoding import decode
from benchmarks.serve.generator import REQUESTS
from benchmarks.serve.traffic import requests

#: Sums of a batch of another size may differ by this.
TOLERANCE = 1e-6


def compared(
    kept: Iterable[tuple[int, bytes]],
    checkpoints: Mapping[str, Path],
    rows: int = shape.ROWS,
    int8: bool = False,
) -> dict[str, Any]:
    """Compares each answer with that of an unsharded model of its version.

    Args:
        kept: whole responses with the index of their moment, as `Outcome.kept`.
        checkpoints: by name, which versions begin with, up to an "@".
        rows: rows of each table.
        int8: whether the tables are INT8.

    Returns:
        Answers, those that differ by more than `TOLERANCE` or have another shape, the largest
        difference, and the number of answers by name.

    Raises:
        ValueError: an answer names a version that is not among the checkpoints.
    """
    answers: dict[str, list[tuple[int, Any]]] = {}
    for moment, response in kept:
        answer = decode(response)
        name = answer.version.partition("@")[0]
        answers.setdefault(name, []).append((moment % REQUESTS, answer.scores))
    unknown = answers.keys() - checkpoints.keys()
    if unknown:
        raise ValueError(f"answers name versions that nobody published: {sorted(unknown)}")
    sent = list(requests(REQUESTS, rows))
    by_checkpoint: dict[Path, list[tuple[int, Any]]] = {}
    for name, found in answers.items():
        by_checkpoint.setdefault(checkpoints[name], []).extend(found)
    wrong, largest = 0, 0.0
    for checkpoint, found in by_checkpoint.items():
        reference = model.load(checkpoint, rows, int8)
        expected = {
            index: model.scores(reference, sent[index]).numpy()
            for index in {index for index, _ in found}
        }
        del reference
        for index, scores in found:
            if scores.shape != expected[index].shape:
                wrong += 1
                continue
            difference = float(np.abs(scores - expected[index]).max(initial=0.0))
            largest = max(largest, difference)
            wrong += not difference <= TOLERANCE  # NaN is wrong
    return {
        "answers": sum(map(len, answers.values())),
        "wrong": wrong,
        "largest_difference": largest,
        "versions": {name: len(found) for name, found in answers.items()},
    }

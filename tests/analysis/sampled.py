"""Samples made by hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_bls.analysis.samples import Lookup, SampledTable, Samples, SampleWriter

Floats = npt.NDArray[np.float32]


def table(name: str = "t", **changes: Any) -> SampledTable:
    known: dict[str, Any] = {
        "rows": 100,
        "dim": 8,
        "pooled": True,
        "weighted": False,
        "data_type": "FP32",
        "features": ("f",),
    }
    return SampledTable(name, **{**known, **changes})


def lookup(weights: Floats, bags: Sequence[Sequence[int]], pooled: bool = True) -> Lookup:
    """Looks up bags of ids, whose rows are added up if they are pooled."""
    ids = np.array([each for bag in bags for each in bag], np.int64)
    lengths = np.array([len(bag) for bag in bags], np.int64)
    sums = np.zeros((len(bags), weights.shape[1]), np.float32)
    for row, bag in zip(sums, bags, strict=True):
        for each in bag:
            row += weights[each]
    return Lookup(ids, lengths, sums if pooled else weights[ids])


def random_weights(rows: int = 100, dim: int = 8, scale: float = 1.0, seed: int = 0) -> Floats:
    drawn: Floats = np.random.default_rng(seed).normal(0, scale, (rows, dim)).astype(np.float32)
    return drawn


def one_id_each(ids: Sequence[int]) -> list[list[int]]:
    return [[each] for each in ids]


def written(
    path: Path, tables: Sequence[SampledTable], batches: Sequence[Sequence[Sequence[Lookup]]]
) -> Samples:
    """Writes [batch][table][feature] and reads it."""
    names = [each.name for each in tables]
    writer = SampleWriter(path, names)
    for batch in batches:
        writer.add(dict(zip(names, batch, strict=True)))
    writer.finish(tables)
    return Samples(path)

"""Reuse in Meta's dlrm_datasets: their published histograms, and the batches themselves.

https://github.com/facebookresearch/dlrm_datasets holds batches with the reuse of production data as
embedding_bag/*/fbgemm_t<tables>_bs<samples>*.pt.gz, and text files of their locality. These
histograms pool all tables: they say nothing of a single table's rows, dims or pooling factor.
"""

from __future__ import annotations

import gzip
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torchrec_bls.sharding.reuse.statistics import REUSE_BINS, TableStatistics

from tests.sharding.reuse.generate_batches import bin_edges

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

Floats = npt.NDArray[np.float64]

_NAME = re.compile(r"^(\S+_t(\d+)_bs(\d+)\S*\.pt)$")
_BIN = re.compile(r"^\((\d+), (\d+)\]: ([\d.]+)$|^\((\d+)\+: ([\d.]+)$")


@dataclass(frozen=True)
class LocalityHistogram:
    """The pooled reuse of one file of dlrm_datasets.

    Attributes:
        name: of the file.
        tables: pooled.
        samples: of the batch.
        lookups: of all tables.
        unique_rows: of all tables.
        by_rows: (17,) float64, the share of the rows in each bin ("histogram of col sizes").
        by_lookups: (17,) float64, the share of the lookups ("ratio of index distribution").
    """

    name: str
    tables: int
    samples: int
    lookups: int
    unique_rows: int
    by_rows: Floats
    by_lookups: Floats

    def mean_reuse(self) -> Floats:
        """Mean lookups of the rows of each bin, (17,) float64.

        It follows from the two shares. They are rounded to three digits: where that leaves
        nothing to divide by, and where it leads out of the bin, it is the nearest count within.
        """
        low, high = bin_edges()
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = self.by_lookups / self.by_rows * (self.lookups / self.unique_rows)
        least = np.floor(low) + 1
        middle = np.sqrt(least * np.where(np.isinf(high), 4 * low, high))
        return np.where(self.by_rows > 0, np.clip(mean, least, high), middle)

    def table_statistics(self, rows: int, pooling_factor: float) -> TableStatistics:
        """Statistics of an average table of this data.

        Args:
            rows: of the table.
            pooling_factor: mean ids per sample.

        Returns:
            Statistics at this histogram's batch size and, halved again and again, at smaller ones.
            There they are those of a part of the shuffled lookups: a row that is read c times in
            the whole is missing from a share p of it with probability (1 - p)^c. So 1,024 samples
            of these files read a row 1.7 times, where the whole batch reads it 8 to 13 times.

        Raises:
            ValueError: with this reuse such a batch reads more rows than that.
        """
        lookups = self.samples * pooling_factor
        shares = self.by_lookups / self.by_lookups.sum()
        rows_in_bin = shares * lookups / self.mean_reuse()
        unique = float(rows_in_bin.sum())
        if unique > rows:
            raise ValueError(
                f"{lookups:.0f} lookups with the reuse of {self.name} read {unique:.0f} rows, and"
                f" the table has {rows}"
            )
        halvings = np.arange(self.samples.bit_length())[::-1]
        sizes = (self.samples >> halvings).astype(np.float64)
        missing = (1.0 - sizes[:, None] / self.samples) ** self.mean_reuse()
        return TableStatistics(
            pooling_factor=pooling_factor,
            sample_sizes=sizes,
            unique_at=(1.0 - missing) @ rows_in_bin,
            reuse_factors=rows_in_bin / rows_in_bin.sum(),
            rows=rows,
        )


def read_locality(path: Path) -> list[LocalityHistogram]:
    """Reads a text file of locality statistics.

    Args:
        path: as dlrm_datasets writes it, several files' statistics one after the other.

    Raises:
        ValueError: a line that can't be read, or a histogram without all its bins.
    """
    return [_parse(block, path) for block in _blocks(path.read_text().splitlines())]


def read_batch(path: Path) -> tuple[KeyedJaggedTensor, int]:
    """Reads one batch of dlrm_datasets, a .pt or .pt.gz file.

    Only tensors are read from it (`torch.load(weights_only=True)`).

    Args:
        path: holds (indices, offsets, lengths) with lengths (tables, samples).

    Returns:
        The batch with features "t_0", "t_1" ..., and its samples.

    Raises:
        ValueError: the file holds something else.
    """
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    with tempfile.TemporaryFile() as unpacked:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as packed:
            shutil.copyfileobj(packed, unpacked)
        unpacked.seek(0)
        content = torch.load(unpacked, weights_only=True, map_location="cpu")
    shape = "indices, offsets and lengths (tables, samples)"
    if not isinstance(content, (tuple, list)) or len(content) != 3:
        raise ValueError(f"{path} does not hold {shape}")
    indices, _, lengths = content
    if lengths.dim() != 2 or int(lengths.sum()) != indices.numel():
        raise ValueError(f"{path} does not hold {shape} that fit together")
    tables, samples = lengths.shape
    batch = KeyedJaggedTensor(
        keys=[f"t_{i}" for i in range(tables)],
        values=indices.long(),
        lengths=lengths.reshape(-1).long(),
    )
    return batch, samples


def _blocks(lines: list[str]) -> list[list[str]]:
    starts = [i for i, line in enumerate(lines) if _NAME.match(line)]
    return [lines[i:j] for i, j in zip(starts, [*starts[1:], len(lines)], strict=True)]


def _parse(lines: list[str], path: Path) -> LocalityHistogram:
    name = _NAME.match(lines[0])
    assert name is not None
    numbers = {}
    histograms: dict[str, list[float]] = {}
    current: list[float] = []
    for line in lines[1:]:
        if found := re.match(r"^Avg # of (indices|unique cols): (\d+)$", line):
            numbers[found[1]] = int(found[2])
        elif line.startswith(("Histogram of col sizes", "Ratio of index distribution")):
            current = histograms.setdefault(line.split()[0], [])
        elif found := _BIN.match(line):
            current.append(float(found[3] or found[5]))
    if set(numbers) != {"indices", "unique cols"} or {
        key: len(bins) for key, bins in histograms.items()
    } != {"Histogram": REUSE_BINS, "Ratio": REUSE_BINS}:
        raise ValueError(f"{path}: {name[1]} lacks numbers or one of its {REUSE_BINS} bins")
    return LocalityHistogram(
        name=name[1],
        tables=int(name[2]),
        samples=int(name[3]),
        lookups=numbers["indices"],
        unique_rows=numbers["unique cols"],
        by_rows=np.asarray(histograms["Histogram"]),
        by_lookups=np.asarray(histograms["Ratio"]),
    )

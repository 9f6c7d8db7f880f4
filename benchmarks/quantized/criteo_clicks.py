"""The start of a Criteo file as clicks, for training and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch

from benchmarks.quantized.planted_clicks import Clicks
from torchrec_bls.datasets.criteo import CriteoDataset

_READ_ROWS = 4096


def criteo_clicks(
    path: Path, train_rows: int, batch_size: int, rows_per_table: Sequence[int]
) -> tuple[Clicks, Clicks]:
    """Reads whole batches of rows for training, and then a sixth as many for tests.

    The challenge has six days for training, and tests on the seventh. A file that is too short
    gives fewer batches.

    Args:
        path: path of the file, see CriteoDataset.
        train_rows: largest number of rows for training.
        batch_size: samples of a batch; the number of training rows is a multiple of it.
        rows_per_table: rows of each of the 26 tables; ids are taken modulo these.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row is not one of Criteo's.
    """
    wanted = -(-train_rows * 7 // 6)
    dataset = CriteoDataset(path, rows_per_table=rows_per_table, batch_size=_READ_ROWS)
    batches = list(islice(dataset, -(-wanted // _READ_ROWS)))
    tables = len(rows_per_table)
    dense = torch.cat([batch.dense_features for batch in batches])
    ids = torch.cat([batch.sparse_features.values().view(tables, -1).T for batch in batches])
    labels = torch.cat([batch.labels for batch in batches]).float()
    clicks = Clicks(dense.numpy(), ids.numpy(), labels.numpy()).rows(0, wanted)
    train = min(train_rows, len(clicks) * 6 // 7)
    train -= train % batch_size
    return clicks.rows(0, train), clicks.rows(train, len(clicks))

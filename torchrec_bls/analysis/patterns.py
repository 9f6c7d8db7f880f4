"""Facts that the rows of a batch show about their table: how many differ, how varied they are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchrec_bls.analysis.samples import Floats, Lookup


def looked_up(lookup: Lookup, pooled: bool) -> npt.NDArray[np.bool_]:
    """Returns for each of (rows,) whether it has ids. A bag without ids has a row of zeros, which
    says nothing about the table.

    Args:
        lookup: lookup of a feature.
        pooled: whether bags have a row each.
    """
    return lookup.lengths > 0 if pooled else np.ones(len(lookup.rows), np.bool_)


def distinct(rows: Floats) -> Floats:
    """Returns the different rows. Rows are compared bit for bit, except for the sign of zeros.

    Args:
        rows: (rows, columns).
    """
    if rows.shape[0] == 0:
        return rows
    plain = np.ascontiguousarray(rows + np.float32(0))  # -0 + 0 is 0
    whole = plain.view(np.dtype((np.void, plain.itemsize * plain.shape[1]))).ravel()
    different: Floats = np.unique(whole).view(np.float32).reshape(-1, plain.shape[1])
    return different


def homogenization(before: int, after: int) -> float:
    """Returns eta, equation 1 of Dual-Level Adaptive Lossy Compression: the share of distinct rows
    that rounding makes equal to others. Tables III and IV there print 1 - eta.

    Args:
        before: number of distinct rows.
        after: number of distinct rows once rounded.
    """
    return (before - after) / before if before else 0.0


def entropy(values: Floats) -> float:
    """Returns the least bits of a value, on average, if each value is coded alone.

    Args:
        values: values of any shape; equal values have one code.
    """
    _, counts = np.unique(values, return_counts=True)
    shares = counts / max(values.size, 1)
    return float(-(shares * np.log2(shares)).sum()) if values.size else 0.0


def zero_rows(rows: Floats) -> int:
    """Returns the number of rows of (rows, columns) that are all zeros."""
    return int((~rows.any(axis=1)).sum())

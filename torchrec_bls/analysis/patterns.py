"""What the rows of a batch say of their table: how many differ, and how varied their values are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchrec_bls.analysis.samples import Floats, Lookup


def looked_up(lookup: Lookup, pooled: bool) -> npt.NDArray[np.bool_]:
    """Returns (rows,) which rows are of ids: bags without any have a row of zeros that says nothing
    of the table.

    Args:
        lookup: lookup of a feature.
        pooled: whether bags have a row each.
    """
    return lookup.lengths > 0 if pooled else np.ones(len(lookup.rows), np.bool_)


def distinct(rows: Floats) -> Floats:
    """Returns the rows that differ, bit for bit but for the sign of zeros.

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
        before: distinct rows.
        after: distinct rows once rounded.
    """
    return (before - after) / before if before else 0.0


def entropy(values: Floats) -> float:
    """Returns the bits that a value needs at least, on average, if each is coded for itself.

    Args:
        values: values of any shape; those that are equal have one code.
    """
    _, counts = np.unique(values, return_counts=True)
    shares = counts / max(values.size, 1)
    return float(-(shares * np.log2(shares)).sum()) if values.size else 0.0


def zero_rows(rows: Floats) -> int:
    """Returns how many of (rows, columns) have nothing but zeros."""
    return int((~rows.any(axis=1)).sum())

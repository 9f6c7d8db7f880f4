"""Gradient-boosted regression trees over arrays, small enough to be stored as JSON.

All trees have the same depth, and every node exists: a node that doesn't split sends everything to
the left. So a prediction is a few gathers for all rows and trees at once, without a library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_bls.records import Record

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Trees:
    """An ensemble whose prediction is the sum over its trees.

    Attributes:
        feature: (trees, 2 ** depth - 1) int64, the column that each inner node looks at. Nodes lie
            level by level, node i has the children 2 i + 1 (left) and 2 i + 2.
        threshold: same shape, float64: a row goes left where its value is at most this.
        value: (trees, 2 ** depth) float64, what each leaf adds.
    """

    feature: Integers
    threshold: Floats
    value: Floats

    def predict(self, rows: Floats) -> Floats:
        """Sums the leaves that each row falls into.

        Args:
            rows: (n, columns) float64.

        Returns:
            (n,) float64.
        """
        total = np.zeros(len(rows))
        everyone = np.arange(len(rows))
        for feature, threshold, value in zip(self.feature, self.threshold, self.value, strict=True):
            total += value[_leaf_of(rows, everyone, feature, threshold)]
        return total

    def as_json(self) -> dict[str, Any]:
        """Returns the arrays as lists; an infinite threshold becomes null."""
        return {
            "feature": self.feature.tolist(),
            "threshold": [
                [None if np.isinf(cut) else cut for cut in tree] for tree in self.threshold.tolist()
            ],
            "value": self.value.tolist(),
        }


class TreesRecord(Record):
    """Trees in a profile."""

    feature: list[list[int]]
    threshold: list[list[float | None]]
    value: list[list[float]]

    def __post_init__(self) -> None:
        """Raises ValueError for trees that are not complete."""
        leaves = len(self.value[0]) if self.value else 2
        lengths = [len(self.feature), len(self.threshold), len(self.value)]
        inner = {*map(len, self.feature), *map(len, self.threshold)}
        if (
            len(set(lengths)) > 1
            or inner - {leaves - 1}
            or {len(each) for each in self.value} - {leaves}
            or leaves & (leaves - 1)
            or leaves < 2
        ):
            raise ValueError("the trees are not complete binary trees of one depth")

    def trees(self, columns: int) -> Trees:
        """Returns the content.

        Args:
            columns: number of columns of the rows that these trees are for.

        Raises:
            ValueError: the trees look at a column that isn't there.
        """
        if not self.feature:
            return empty()
        if not all(0 <= column < columns for nodes in self.feature for column in nodes):
            raise ValueError(f"the trees look at a column outside 0 ... {columns - 1}")
        cuts = [[np.inf if cut is None else cut for cut in nodes] for nodes in self.threshold]
        return Trees(
            np.asarray(self.feature, np.int64),
            np.asarray(cuts, np.float64),
            np.asarray(self.value, np.float64),
        )


def empty() -> Trees:
    """No trees, which predict 0."""
    return Trees(np.zeros((0, 1), np.int64), np.zeros((0, 1)), np.zeros((0, 2)))


@dataclass(frozen=True)
class Bins:
    """The values of some rows. Each is replaced by the number of cuts below it.

    Attributes:
        cuts: cuts of each column, ascending.
        codes: (rows, columns) int64, from 0 to the number of the column's cuts.
        width: number of cuts of the column with the most, plus 1.
    """

    cuts: tuple[Floats, ...]
    codes: Integers
    width: int

    @classmethod
    def of(cls, rows: Floats, most: int = 24) -> Bins:
        """Cuts each column between its quantiles, at most `most` times."""
        cuts = tuple(_cuts(column, most) for column in rows.T)
        codes = [np.searchsorted(c, v, side="left") for c, v in zip(cuts, rows.T, strict=True)]
        width = 1 + max(len(each) for each in cuts)
        return cls(cuts, np.stack(codes, axis=1).astype(np.int64), width)


def grow(
    bins: Bins, gradient: Floats, weight: Floats, depth: int, least_weight: float
) -> tuple[Integers, Floats, Integers]:
    """Grows one tree that explains `gradient`.

    Each node takes the cut with the largest gain G_l^2 / W_l + G_r^2 / W_r - G^2 / W. G and W are
    the sums of gradients and weights on either side (XGBoost, Chen and Guestrin 2016).

    Args:
        bins: the rows.
        gradient: (n,), gradient of each row.
        weight: (n,), weight of each row, at least 0.
        depth: number of levels of cuts.
        least_weight: weight that either side of a cut must have, positive.

    Returns:
        The feature and threshold of the nodes, and the leaf of each row.
    """
    nodes = 2**depth - 1
    feature = np.zeros(nodes, dtype=np.int64)
    threshold = np.full(nodes, np.inf)
    position = np.zeros(len(gradient), dtype=np.int64)
    for node in range(nodes):
        members = np.flatnonzero(position == node)
        right = np.zeros(len(members), dtype=bool)
        best = _best_cut(bins, members, gradient, weight, least_weight)
        if best is not None:
            column, cut = best
            feature[node], threshold[node] = column, bins.cuts[column][cut]
            right = bins.codes[members, column] > cut
        position[members] = 2 * node + 1 + right
    return feature, threshold, position - nodes


def _best_cut(
    bins: Bins, members: Integers, gradient: Floats, weight: Floats, least_weight: float
) -> tuple[int, int] | None:
    columns = len(bins.cuts)
    slots = (bins.codes[members] + np.arange(columns) * bins.width).ravel()

    def below(numbers: Floats) -> Floats:
        sums = np.bincount(slots, np.repeat(numbers[members], columns), columns * bins.width)
        ascending: Floats = np.cumsum(sums.reshape(columns, bins.width), axis=1)
        return ascending

    left_g, left_w = below(gradient), below(weight)
    whole_g, whole_w = left_g[:, -1:], left_w[:, -1:]
    right_w = whole_w - left_w
    allowed = (left_w >= least_weight) & (right_w >= least_weight)
    if not allowed.any():
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = left_g**2 / left_w + (whole_g - left_g) ** 2 / right_w - whole_g**2 / whole_w
    gain = np.where(allowed, gain, 0.0)
    best = int(gain.argmax())
    if gain.flat[best] <= 1e-12:
        return None
    return best // bins.width, best % bins.width


def _leaf_of(rows: Floats, everyone: Integers, feature: Integers, threshold: Floats) -> Integers:
    node = np.zeros(len(rows), dtype=np.int64)
    for _ in range(len(feature).bit_length()):
        node = 2 * node + 1 + (rows[everyone, feature[node]] > threshold[node])
    return node - len(feature)


def _cuts(column: Floats, most: int) -> Floats:
    distinct = np.unique(column)
    between = (distinct[:-1] + distinct[1:]) / 2
    if len(between) <= most:
        return between
    quantiles = np.quantile(column, np.linspace(0, 1, most + 2)[1:-1])
    return np.unique(between[np.clip(np.searchsorted(between, quantiles), 0, len(between) - 1)])

"""The classes of tables by the errors that their embeddings may have. They are the paper's classes,
by a rule that the paper leaves out.

Dual-Level Adaptive Lossy Compression gives tables of a large eta (equation 1) a small bound, and
tables of a small eta a large one. It does not print the thresholds. The medium tables of its Tables
III and IV have eta = 0. A smaller eta is impossible, so that eta alone cannot tell which tables are
large. Here a table is
* small if rounding makes more than 1 in 20 of a batch's distinct rows equal to others. Its rows
  are close together, and errors of that size lose the differences. In Tables III and IV eta is 0 or
  at least 0.06;
* otherwise large if a batch has few distinct rows, at most one for eight rows. The next layers
  learn these few rows, wherever rounding moves them. The paper's large tables are the shortest
  ones, all but one, as Table II and the cardinalities of its data show;
* otherwise medium.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torchrec_bls.codecs.error_bound import ErrorBound

SMALL_FROM_ETA = 0.05
LARGE_UP_TO_SHARE = 1 / 8


class TableClass(Enum):
    """The size of a table's bound."""

    SMALL = "small"
    MEDIUM = "medium"
    LARGE = "large"


@dataclass(frozen=True)
class ClassBounds:
    """The bounds of the classes, and the bound of the probe that tells classes apart.

    Attributes:
        small: bound of small tables, by default the paper's (section IV-B); likewise `medium` and
            `large`.
        probe: bound by which rows are rounded for eta. The paper has 0.01 and 0.005 for two data
            sets.
    """

    small: float = 0.01
    medium: float = 0.03
    large: float = 0.05
    probe: float = 0.01

    def __post_init__(self) -> None:
        """Raises ValueError for bounds that are impossible or do not ascend."""
        for bound in (self.small, self.medium, self.large, self.probe):
            ErrorBound(bound)
        if not self.small <= self.medium <= self.large:
            raise ValueError(
                f"the bounds are {self.small:g}, {self.medium:g} and {self.large:g}, but must "
                "ascend from small to large"
            )

    def of(self, table_class: TableClass) -> float:
        """Returns the bound of a class."""
        bound: float = getattr(self, table_class.value)
        return bound


def class_of(eta: float, distinct_share: float) -> TableClass:
    """Returns the class of a table.

    Args:
        eta: share of distinct rows that rounding makes equal to others, by equation 1.
        distinct_share: ratio of distinct rows to all rows that a batch looks up.
    """
    if eta > SMALL_FROM_ETA:
        return TableClass.SMALL
    return TableClass.LARGE if distinct_share <= LARGE_UP_TO_SHARE else TableClass.MEDIUM

"""How large the errors of a table's embeddings may be: the classes of the paper, by a rule that it
leaves unsaid.

Dual-Level Adaptive Lossy Compression gives tables of a large eta (equation 1) a small bound, and
those of a small eta a large one, by thresholds that it does not print. The medium tables of its
Tables III and IV have eta = 0. Less is impossible, so that eta alone cannot tell large ones. Here a
table is

* small, where rounding makes more than 1 in 20 of a batch's distinct rows equal to others: rows
  are close together, and errors of that size lose what tells them apart. In Tables III and IV eta
  is 0 or at least 0.06;
* large, otherwise, where a batch has few distinct rows, one for eight rows or less: the layers that
  follow learn these few, wherever rounding moves them. The paper's large tables are the shortest
  ones, all but one, as Table II and the cardinalities of its data show;
* medium, otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torchrec_bls.codecs.error_bound import ErrorBound

SMALL_FROM_ETA = 0.05
LARGE_UP_TO_SHARE = 1 / 8


class TableClass(Enum):
    """How large the bound of a table is."""

    SMALL = "small"
    MEDIUM = "medium"
    LARGE = "large"


@dataclass(frozen=True)
class ClassBounds:
    """The bounds of the classes, and the one that they are told apart by.

    Attributes:
        small: as the paper has them, section IV-B; likewise `medium` and `large`.
        probe: rows are rounded by it for eta. The paper has 0.01 and 0.005 for two data sets.
    """

    small: float = 0.01
    medium: float = 0.03
    large: float = 0.05
    probe: float = 0.01

    def __post_init__(self) -> None:
        """Raises ValueError for bounds that cannot be kept, or that do not ascend."""
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
        distinct_share: distinct rows of all rows that a batch looks up.
    """
    if eta > SMALL_FROM_ETA:
        return TableClass.SMALL
    return TableClass.LARGE if distinct_share <= LARGE_UP_TO_SHARE else TableClass.MEDIUM

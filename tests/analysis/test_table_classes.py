"""The rule of the classes, and their bounds."""

import math

import pytest

from torchrec_bls.analysis.patterns import homogenization
from torchrec_bls.analysis.table_classes import ClassBounds, TableClass, class_of

SMALL, MEDIUM, LARGE = TableClass

# Distinct rows before and after, of so many rows, by Tables III and IV; classes by Table II.
PAPER = [
    (110, 68, 128, SMALL),
    (103, 86, 128, SMALL),
    (84, 77, 128, SMALL),
    (67, 63, 128, SMALL),
    (19, 19, 128, MEDIUM),
    (61, 61, 128, MEDIUM),
    (1055, 484, 2048, SMALL),
    (937, 795, 2048, SMALL),
    (983, 983, 2048, MEDIUM),
    (1302, 1302, 2048, MEDIUM),
]


@pytest.mark.parametrize(("before", "after", "rows", "expected"), PAPER)
def test_tables_of_the_paper_have_their_classes(
    before: int, after: int, rows: int, expected: TableClass
) -> None:
    assert class_of(homogenization(before, after), before / rows) is expected


@pytest.mark.parametrize(
    ("eta", "share", "expected"),
    [
        (0, 0.125, LARGE),
        (0, 0.126, MEDIUM),
        (0.05, 0.01, LARGE),
        (0.051, 0.01, SMALL),
        (0.051, 1, SMALL),
        (1, 1, SMALL),
    ],
)
def test_where_classes_end(eta: float, share: float, expected: TableClass) -> None:
    assert class_of(eta, share) is expected


def test_classes_have_the_papers_bounds_or_others() -> None:
    assert [ClassBounds().of(each) for each in TableClass] == [0.01, 0.03, 0.05]
    others = ClassBounds(1.0, 1.0, 2.0, probe=0.5)
    assert [others.of(each) for each in TableClass] == [1, 1, 2]


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ((0.0, 0.03, 0.05), r"the error bound is 0\.0, but must be from"),
        ((0.01, math.nan, 0.05), "the error bound is nan"),
        ((0.01, 0.03, math.inf), "the error bound is inf"),
        ((0.01, 0.03, 0.05, -1.0), r"the error bound is -1\.0"),
        ((0.03, 0.01, 0.05), "the bounds are 0.03, 0.01 and 0.05, but must ascend from small"),
        ((0.01, 0.06, 0.05), "must ascend"),
    ],
)
def test_bounds_that_cannot_be(bounds: tuple[float, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ClassBounds(*bounds)

"""Every row of the fault matrix goes as it says, with real processes."""

import pytest

from tests.faults.judge import examine, may_mount
from tests.faults.matrix import MATRIX
from tests.faults.row import Row


@pytest.mark.parametrize("row", MATRIX, ids=[row.name for row in MATRIX])
def test_fault(row: Row) -> None:
    if row.needs_mount and not may_mount():
        pytest.skip("mounting needs CAP_SYS_ADMIN")
    verdict = examine(row)
    assert not verdict.problems, "\n".join(verdict.problems)


def test_names_are_unique() -> None:
    names = [row.name for row in MATRIX]
    assert len(set(names)) == len(names)

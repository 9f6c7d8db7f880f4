"""No mutation of a file gives anything but its content or a reason."""

from pathlib import Path

import pytest

from tests.mutations.check import check
from tests.mutations.files import KINDS


@pytest.mark.parametrize("name", KINDS)
def test_a_mutated_file_is_read_or_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    counts = check(name, 25, 0, tmp_path)
    assert counts["refused"] > 5

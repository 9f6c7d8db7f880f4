"""The bad ids that kernels have found: no host was asked before they read."""

from typing import NamedTuple

import torch

#: Numbers of a program in a report: key, position and id of its first bad id; the key is -1 if it
#: has none.
REPORT_FIELDS = 3


class BadId(NamedTuple):
    """An id that its table has no row for.

    Attributes:
        key: place of its feature among the keys of the batch.
        position: its place among the ids of the batch; their number, with 0 as the id, if the
            lengths of the feature do not fit the ids.
        id: the id.
    """

    key: int
    position: int
    id: int


def new_report(programs: int, device: torch.device) -> torch.Tensor:
    """Returns a report for a launch of so many programs, int64 [programs, 3]. Each launch writes
    all of it."""
    return torch.full((programs, REPORT_FIELDS), -1, dtype=torch.int64, device=device)


def first_bad_id(report: torch.Tensor) -> BadId | None:
    """Returns the bad id of the lowest position in a report, None if all ids are good. It waits for
    a report that is on a GPU."""
    found = [BadId(*each) for each in report.tolist() if each[0] >= 0]
    return min(found, key=lambda bad: bad.position, default=None)

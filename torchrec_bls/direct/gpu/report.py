"""The bad ids that kernels have found: no host was asked before they read."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchrec_bls.direct.gpu.cuda import Event

if TYPE_CHECKING:
    from torchrec_bls.direct.gpu.reader import GpuReader

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


@dataclass
class Launch:
    """Reads that were launched.

    Attributes:
        reader: reader of the tables.
        report: report of bad ids, int64 [programs, 3], which is written by then.
        done: event behind them; None: they are in a CUDA graph, and each replay does them again.
    """

    reader: "GpuReader"
    report: torch.Tensor
    done: Event | None = None

    def is_done(self) -> bool:
        """Returns whether the rows are read."""
        assert self.done is not None
        return self.done.query()

    def wait(self) -> None:
        """Waits until the rows are read."""
        assert self.done is not None
        self.done.synchronize()

    def bad_id(self) -> BadId | None:
        """Waits until the rows are read, and returns the first id that has none."""
        self.wait()
        return first_bad_id(self.report)

"""Algorithm 1 of the paper, line by line, for comparison: two streams a rank, no cores, no lag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Between two kernels of a stream, microseconds (line 21).
_BETWEEN_KERNELS_US = 1.0


class Overheads(NamedTuple):
    """The host's times for an op, microseconds.

    Attributes:
        t1: time between it and the op before.
        t2: time before its first launch.
        t3: time after its last launch.
        t4: time of a launch.
        t5: time between two launches; the whole time of an op that launches nothing.
    """

    t1: float = 0.0
    t2: float = 0.0
    t3: float = 0.0
    t4: float = 0.0
    t5: float = 0.0


@dataclass(frozen=True)
class Op:
    """An op of a rank's execution trace.

    Attributes:
        overheads: overheads of the host.
        kernels: microseconds of each kernel that it launches.
        communicates: whether it is a collective of all ranks.
        depends: whether it reads what the last collective wrote.
    """

    overheads: Overheads
    kernels: tuple[float, ...] = ()
    communicates: bool = False
    depends: bool = False


@dataclass(frozen=True)
class Prediction:
    """What Algorithm 1 returns.

    Attributes:
        total_us: microseconds of the slowest rank.
        active_us: time in which the streams of a rank run kernels, the most of any rank.
    """

    total_us: float
    active_us: float


def algorithm_1(ranks: Sequence[Sequence[Op]]) -> Prediction:
    """Predicts a step as *Towards Universal Performance Modeling*, section IV-B, Algorithm 1.

    "Update gpu_time" (line 22) is read as: a kernel adds the part of it that lies behind the end of
    both streams. The authors' released code differs from the text in several points. A kernel
    starts T4, not T4 / 2, after its launch began. Each kernel has a constant added, and some ops
    have none, by their names. Ranks are synchronised at each kernel of a collective, not after all
    of them. Waits synchronise the streams too. And the result of several ranks is the last stream
    that was used, not the maximum of streams and host (line 40).

    Args:
        ranks: the ops of each rank, in their order.

    Raises:
        ValueError: there are no ranks, or ranks have different numbers of collectives.
    """
    if not ranks:
        raise ValueError("there are no ranks: give the ops of each")
    collectives = [sum(op.communicates for op in ops) for ops in ranks]
    if len(set(collectives)) > 1:
        raise ValueError(f"ranks have {collectives} collectives, but all take part in each")
    processes = [_Process(ops) for ops in ranks]
    for _ in range(collectives[0]):
        for process in processes:
            process.run_kernels_of_next_collective()
        # Lines 29-31.
        together = max(process.communication for process in processes)
        for process in processes:
            process.communication = together
            process.end_collective()
    for process in processes:
        process.run_to_end()
    # Lines 40-41.
    return Prediction(
        max(max(each.communication, each.compute, each.host) for each in processes),
        max(each.active for each in processes),
    )


class _Process:
    """A rank: when its streams and its host are done with their work, microseconds."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self._ops = iter(ops)
        self._in_collective: Op | None = None
        self._has_last_collective = False
        self.host = self.communication = self.compute = self.active = 0.0

    def run_kernels_of_next_collective(self) -> None:
        """Runs up to line 27 of the next collective, where ranks meet."""
        for op in self._ops:
            self._run_kernels(op)
            if op.communicates:
                self._in_collective = op
                return
            self._end(op)

    def end_collective(self) -> None:
        """Runs from line 32 on."""
        assert self._in_collective is not None
        self._end(self._in_collective)
        self._has_last_collective = True

    def run_to_end(self) -> None:
        """Runs the ops after the last collective."""
        for op in self._ops:
            self._run_kernels(op)
            self._end(op)

    def _run_kernels(self, op: Op) -> None:
        if op.communicates or (op.depends and self._has_last_collective):  # lines 12-15
            self._has_last_collective = False
            self.communication = self.compute = max(self.communication, self.compute)
        self.host += op.overheads.t1
        if op.kernels:
            self.host += op.overheads.t2
        for number, kernel in enumerate(op.kernels):
            front = max(self.communication, self.compute)
            stream = self.communication if op.communicates else self.compute
            end = max(stream + _BETWEEN_KERNELS_US, self.host + op.overheads.t4 / 2) + kernel
            if op.communicates:
                self.communication = end
            else:
                self.compute = end
            self.active += min(max(end - front, 0.0), kernel)
            self.host += op.overheads.t4
            if number < len(op.kernels) - 1:
                self.host += op.overheads.t5

    def _end(self, op: Op) -> None:
        self.host += op.overheads.t3 if op.kernels else op.overheads.t5

"""Driving one rank through its batches under drawn delays, with a stopwatch on every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torchrec.datasets.utils import Batch

Progress = Callable[[Iterator[Batch]], torch.Tensor]


@dataclass(frozen=True)
class RankTimes:
    """One rank's times of one run, in seconds; step T stands for emptying the pipeline.

    Attributes:
        started: the first step's start, on the clock that all processes share.
        total: seconds from the first step's start to the last result.
        slept: (T + 1), the delay that a step really had.
        own: (T + 1), the rest of a step without delay and waiting: lookup, dense part, copies.
        waited: seconds of waiting for peers over the whole run.
        answered: (T), from the start of a batch's step, its delay included, to its logits.
    """

    started: float
    total: float
    slept: list[float]
    own: list[float]
    waited: float
    answered: list[float]


class DelayedBatches:
    """An iterator over batches that sleeps before it hands one out, and takes the times.

    A pipeline asks for a batch at the start of a step and posts afterwards. So the delay comes
    before the post, and the requests separate the steps.
    """

    def __init__(
        self,
        batches: Sequence[Batch],
        delays: Sequence[float],
        waited: Callable[[], float],
        on_step: Callable[[], object],
    ) -> None:
        self._batches = batches
        self._delays = delays
        self._waited = waited
        self._on_step = on_step
        self._marks: list[tuple[float, float]] = []
        self._slept: list[float] = []
        self._answered: list[float] = []

    def __iter__(self) -> Iterator[Batch]:
        """Returns itself."""
        return self

    def __next__(self) -> Batch:
        """Sleeps for the step's delay and returns its batch."""
        step = len(self._slept)
        if len(self._marks) == step:
            self._mark()
        if step == len(self._batches):
            raise StopIteration
        start = self._marks[-1][0]
        time.sleep(self._delays[step])
        self._slept.append(time.monotonic() - start)
        self._on_step()
        return self._batches[step]

    def note_answer(self) -> None:
        """Takes the time at which the oldest batch without an answer has got it."""
        self._answered.append(time.monotonic())

    def _mark(self) -> None:
        self._marks.append((time.monotonic(), self._waited()))

    def finish(self) -> RankTimes:
        """Ends the last step now and adds up."""
        self._mark()
        slept = [*self._slept, 0.0]
        own = [
            end - start - delay - (waited_after - waited_before)
            for (start, waited_before), (end, waited_after), delay in zip(
                self._marks, self._marks[1:], slept, strict=False
            )
        ]
        (start, waited_before), (end, waited_after) = self._marks[0], self._marks[-1]
        return RankTimes(
            started=start,
            total=end - start,
            slept=slept,
            own=[max(duration, 0.0) for duration in own],
            waited=waited_after - waited_before,
            answered=[
                answer - start
                for answer, (start, _) in zip(self._answered, self._marks, strict=False)
            ],
        )


def run_steps(
    progress: Progress,
    batches: Sequence[Batch],
    delays: Sequence[float],
    *,
    waited: Callable[[], float],
    on_step: Callable[[], object],
) -> tuple[list[torch.Tensor], RankTimes]:
    """Runs a pipeline until it is drained.

    Args:
        progress: takes an iterator, returns the oldest batch's logits, raises StopIteration at the
            end.
        batches: T batches.
        delays: T delays in seconds.
        waited: seconds this rank has waited for its peers so far.
        on_step: a function that is called once a batch.

    Returns:
        The logits of each batch in order, and the times.

    Raises:
        RuntimeError: the pipeline ended with another number of results than batches.
    """
    source = DelayedBatches(batches, delays, waited, on_step)
    logits: list[torch.Tensor] = []
    with torch.no_grad():
        while True:
            try:
                logits.append(progress(source))
            except StopIteration:
                break
            source.note_answer()
    times = source.finish()
    if len(logits) != len(batches):
        raise RuntimeError(f"the pipeline gave {len(logits)} results for {len(batches)} batches")
    return logits, times

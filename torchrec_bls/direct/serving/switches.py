"""The changes of a model from one generation to the next, between two of its forwards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import FrameType
from typing import Any

from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.reads.direct_reads import AnyReads
from torchrec_bls.direct.serving.dense_state import DenseState
from torchrec_bls.direct.serving.dense_versions import DenseVersions
from torchrec_bls.direct.serving.follower import Follower
from torchrec_bls.direct.serving.gate import Gate, runs_any
from torchrec_bls.distributed.outputs.inference_mode import outside_inference_mode
from torchrec_bls.errors import PeerTimeoutError

Generations = tuple[Generation, ...]

# Seconds that a switch waits for the forwards of other threads. It waits for one of each.
_LONGEST_FORWARD = 60.0


@dataclass(frozen=True)
class _Log:
    """A switch that was begun: all that it takes to finish it, however often it was interrupted.

    Attributes:
        generations: generation of each module.
        steps: functions that make each module read it, and show it; none of them fails.
        dense: new state beside the tables; None where it stays.
        dense_before: state to put back if a module refuses the new one.
    """

    generations: Generations
    steps: Sequence[Callable[[], None]]
    dense: Mapping[str, Any] | None
    dense_before: Mapping[str, Any]


class Switches:
    """Changes tables, dense state and shown weights of a model together.

    A switch is a redo log. All that may fail comes first, then one store says that it has begun,
    and its steps can be repeated. A forward runs only if no switch is half done. So whatever
    interrupts one, the next forward finishes it.

    Args:
        reads: direct reads of the model's modules.
        dense: state beside the tables.
        dense_versions: dense state of each version.
        follower: follower that maps what serves.
        serving: generation of each module that is read now.

    Attributes:
        gate: gate of the model's forwards. `finish` and `published_in_place`
            are called with its lock.
        taken: generation of each module that is read now.
        settled: the newest generations when a forward asked last. As long as there are no newer
            ones, a forward has nothing to ask. None: it has.
        problem: why the newest generation is not taken; empty if it is.
    """

    def __init__(
        self,
        reads: Sequence[AnyReads],
        dense: DenseState,
        dense_versions: DenseVersions,
        follower: Follower,
        serving: Generations,
    ) -> None:
        self.gate = Gate()
        self.taken = serving
        self.settled: Generations | None = serving
        self.problem = ""
        self._reads = list(reads)
        self._dense = dense
        self._dense_versions = dense_versions
        self._follower = follower
        self._dense_mark = self._published_mark = dense.mark()
        # Dense state of the generation that is read, whatever was written to the model's since.
        self._dense_taken = _copy_if_possible(dense)
        self._log: _Log | None = None
        # What was not taken: because a module refuses it, or a thread stays in its forward.
        self._refused: Generations | None = None
        self._stuck: list[FrameType] = []
        self._holds_back_writes = False

    @property
    def is_half_done(self) -> bool:
        """Returns whether a switch was begun and not finished."""
        log = self._log
        return log is not None and log.generations is not self.taken

    @property
    def would_lose_writes(self) -> bool:
        """Returns whether a switch would lose what was written to the model's weights in place: it
        is in no announced generation."""
        return self._dense.mark() not in (self._dense_mark, self._published_mark) or any(
            reads.live is not None and reads.live.would_lose_writes for reads in self._reads
        )

    def published_in_place(self) -> None:
        """Notes that the weights of this moment are announced. If dense ones were written to, no
        forward runs with them before the tables of their generation serve."""
        self._published_mark = self._dense.mark()
        if self._published_mark != self._dense_mark:
            self._holds_back_writes, self.settled = True, None

    @outside_inference_mode
    def replace_writes(self, version: str) -> None:
        """Notes that an announced version replaces what was written to the weights. If it is read
        already, the weights show it again.

        Args:
            version: name of the version.

        Raises:
            PeerTimeoutError: see `take_newest`.
        """
        with self.gate.lock:
            self.finish()
            live = [reads.live for reads in self._reads if reads.live is not None]
            for each in live:
                each.published(each.writes())
            is_written = any(each.written for each in live) or self._dense_mark != (
                self._dense.mark()
            )
            if is_written and self.taken[0].version == version:
                # Another tuple, so that a switch to it that is interrupted counts as half done.
                again = (*self.taken,)
                self._run(self._log_of(again, self._dense_taken))

    def take_newest(self) -> None:
        """Changes to the version that serves, in all modules or, if that fails, in none.

        Raises:
            PeerTimeoutError: another thread stays in a forward. As long as it does, later calls
                change nothing, and forwards go on with the generation before.
            ValueError: writes to the weights would be lost; or a module refuses its dense state,
                and all stay with the generation before.
            ProtocolError: another process published the dense state of another model.
        """
        self._take_newest(is_asked_by_batch=True)

    def follow_drained(self) -> None:
        """Changes to the newest version, without a batch, if it or the one that is read is drained.
        Raises as `take_newest`."""
        newest = self._follower.newest
        is_drained = newest[0].drained_for or self.taken[0].drained_for
        if is_drained and newest is not self.taken:
            self._take_newest(is_asked_by_batch=False)

    @outside_inference_mode
    def _take_newest(self, *, is_asked_by_batch: bool) -> None:
        with self.gate.lock:
            before = self.taken
            if not is_asked_by_batch:  # who asks for the version of the last one is told that
                for reads in self._reads:
                    reads.last_version = reads.version
            self._take(self._follower.newest)
            self._dense_versions.forget_until(self.taken[0].serial)
            if is_asked_by_batch:
                for reads in self._reads:
                    reads.last_version = None
            else:
                self.settled = None  # so that the next one asks
        if self.taken is not before:
            self._follower.release(before)

    def _take(self, newest: Generations) -> None:
        self.finish()
        if newest not in (self.taken, self._refused) and not self._are_stuck():
            self._run(self._log_of(newest, self._dense_versions.of(newest[0])))
        if self._holds_back_writes:
            raise ValueError(
                "dense weights were written to in place and published, but the tables of "
                f"version {self.taken[0].version!r} are read until all ranks have published theirs"
            )
        if newest in (self.taken, self._refused):
            self.settled = newest

    def finish(self) -> None:
        """Finishes a switch that was interrupted. Raises PeerTimeoutError as `take_newest`."""
        if self.is_half_done:
            assert self._log is not None
            self._run(self._log)

    def snapshot(self) -> tuple[Generations, Mapping[str, Any]]:
        """Returns the generations that are read, and the dense state that belongs to them. What was
        written to the weights since belongs to another version, or to none.

        Raises:
            ValueError: the state can't be handed to other processes.
        """
        with self.gate.lock:
            self.finish()
            dense = self._dense_taken
            return self.taken, self._dense.copy() if dense is None else dense

    def _log_of(self, newest: Generations, dense: Mapping[str, Any] | None) -> _Log:
        steps = [
            reads.prepare(generation) for reads, generation in zip(self._reads, newest, strict=True)
        ]
        before = {} if dense is None else self._dense.copy()
        return _Log(newest, steps, dense, before)

    def _run(self, log: _Log) -> None:
        try:
            self.gate.while_closed(partial(self._apply, log), _LONGEST_FORWARD)
        except PeerTimeoutError as error:
            self._stuck = list(chain(*self.gate.running().values()))
            self.problem = str(error)
            raise

    def _apply(self, log: _Log) -> None:
        if log.dense is not None:
            self._settle()
        self._log = log
        try:
            if log.dense is not None:
                self._load(log.dense)
        except Exception as error:
            self._load(log.dense_before)
            self._refused, self._log = log.generations, None
            self.problem = (
                f"version {log.generations[0].version!r} is not taken: the model refuses its dense "
                f"weights: {error}"
            )
            raise ValueError(self.problem) from error
        for step in log.steps:
            step()
        self._dense_mark = self._published_mark = self._dense.mark()
        self._holds_back_writes, self.problem = False, ""
        self._refused = None  # it does not come again, and would keep its tables mapped
        if log.dense is not None:
            self._dense_taken = log.dense
        self.taken = log.generations
        self._log = None

    def _load(self, dense: Mapping[str, Any]) -> None:
        self._dense.load(dense)
        self._settle()

    def _settle(self) -> None:
        """Waits for GPUs, which may have dense weights: kernels of forwards that have returned may
        still read them, on any stream, and later ones need not be behind what is written here."""
        for gpu in {reads.tables.gpu for reads in self._reads}:
            if gpu is not None:
                gpu.settle()

    def _are_stuck(self) -> bool:
        if not runs_any(self._stuck):
            self._stuck = []
        return bool(self._stuck)


def _copy_if_possible(dense: DenseState) -> Mapping[str, Any] | None:
    try:
        return dense.copy()
    except ValueError:  # whoever hands it over is told why it can't be
        return None

"""Who may call an exchanging module: one thread at a time, or the pipeline that it belongs to.

Other ranks match calls by their order. So a call in the middle of another one's would get its
embeddings, or would make all ranks wait.
"""

import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

from torchrec_bls.collective.forwards import Forwards
from torchrec_bls.lifetime import new_lock


class Callers:
    """The callers of one exchanging module.

    Args:
        where: name of the module and its rank, for errors.
        forwards: forwards of the module.
        under_way: function that returns whether posts of the module are not waited for.

    Attributes:
        agreeing: lock of the first call, in which the ranks agree on the lookup.
    """

    def __init__(self, where: str, forwards: Forwards, under_way: Callable[[], bool]) -> None:
        self.agreeing = new_lock()
        self._where = where
        self._forwards = forwards
        self._under_way = under_way
        self._lock = new_lock()
        self._thread: int | None = None
        self._pipeline: weakref.ref[Any] | None = None
        self._leftovers: Callable[[], None] | None = None

    @property
    def pipeline(self) -> Any:
        """Returns the pipeline that the module belongs to, or None."""
        return None if self._pipeline is None else self._pipeline()

    def enter(self) -> None:
        """Begins a call by this thread, before anything is posted.

        Raises:
            ValueError: the module belongs to a pipeline, or another thread is calling it.
        """
        if self._pipeline is not None:
            self._refuse_pipelined(None)
        if self._thread != get_ident():
            self._take_over()
        if self._leftovers is not None:
            self._finish_leftovers()

    def claim(self, pipeline: Any) -> None:
        """Makes `pipeline` the only caller until `release`, or until it is collected.

        Raises:
            ValueError: the module belongs to another pipeline, or another thread is calling it.
        """
        self._refuse_pipelined(pipeline)
        self._take_over()
        self._finish_leftovers()
        self._pipeline = weakref.ref(pipeline)

    def release(self, leftovers: Callable[[], None] | None = None) -> None:
        """Ends a claim.

        Args:
            leftovers: function that finishes the pipeline's batches under way, without an output.
                The next call begins with it: other ranks may still need this rank's part.
        """
        self._pipeline = None
        self._leftovers = leftovers

    def _refuse_pipelined(self, pipeline: Any) -> None:
        other = self.pipeline
        if other is not None and other is not pipeline:
            raise ValueError(
                f"{self._where} belongs to a BoundedLagPipeline: drain() and detach() that one "
                "before the model is called, or gets another pipeline"
            )

    def _take_over(self) -> None:
        with self._lock:
            before = self._thread
            try:
                # Set first: from here on a call of the thread before waits for the lock in `enter`.
                self._thread = get_ident()
                if before not in (None, self._thread) and self._is_calling(before):
                    raise ValueError(
                        f"{self._where}: another thread of this process (identity {before}) is "
                        "calling the model, or has not waited for its embeddings. All ranks match "
                        "calls by their order, so one thread at a time may call it: use a lock"
                    )
                if (scope := self._forwards.now[1]) is not None:
                    scope.admit()
            except BaseException:  # a signal, too
                self._thread = before
                raise

    def _is_calling(self, thread: int | None) -> bool:
        has_ended = thread not in sys._current_frames()
        return not has_ended and self._under_way()

    def _finish_leftovers(self) -> None:
        try:
            if self._leftovers is not None:
                self._leftovers()
        except Exception:
            self._leftovers = None
            raise
        self._leftovers = None  # after a signal the next call goes on with them

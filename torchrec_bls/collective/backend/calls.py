"""Calls of a group that go through its channel, and the handles that callers get for them."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.futures import Future

from torchrec_bls import _native
from torchrec_bls.collective.channel import BoundedLagChannel
from torchrec_bls.collective.ordered_window import OrderedWindow
from torchrec_bls.errors import BLSError, PoisonedError, named

Receive = Callable[[_native.Arrival], None]


class CallQueue:
    """Posts calls on a channel and completes them in the same order.

    A call beyond the bound completes the oldest first. Calls may come from any thread, but go
    through one at a time. A failure fails all calls under way: they share the channel.
    """

    def __init__(self, channel: BoundedLagChannel) -> None:
        self.channel = channel
        self._window: OrderedWindow[CallWork] = OrderedWindow(channel.bound)
        self._lock = threading.Lock()

    def post(
        self,
        send: _native.Buffers,
        receive: Receive,
        inputs: Sequence[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> "CallWork":
        """Sends to each rank its part. `receive` gets what all ranks have sent to this one.

        Args:
            send: memory to send, by rank.
            receive: function that writes the outputs; raises ProtocolError for messages of a wrong
                size.
            inputs: tensors that own the memory to send; this rank's own part is read at completion.
            outputs: result of the handle.

        Raises:
            BLSError: a rank failed or died.
        """
        with self._lock:
            if self._window.is_full:
                self._complete_oldest()
            work = CallWork(self, receive, inputs, outputs)
            posted = self.channel.native.posted
            try:
                self._window.post(work, lambda native: _native.post_buffers(native, send))
            except BaseException as error:
                if self.channel.native.posted != posted or not isinstance(error, Exception):
                    self._fail(error)
                raise
            return work

    def complete(self, work: "CallWork") -> None:
        """Waits until `work` and everything posted before it is finished."""
        try:
            with self._lock:
                while not work.finished:
                    self._complete_oldest()
        except BaseException as error:
            # Another thread found this call in its own wait while this thread waited for that
            # thread.
            if not work.finished:
                self.channel.poison(named(error))
            raise

    def complete_if_ready(self, work: "CallWork") -> None:
        """Finishes `work` if that takes no waiting."""
        if not self._lock.acquire(blocking=False):
            return  # another thread waits, and may finish it
        try:
            while not work.finished and self.channel.native.ready():
                self._complete_oldest()
        finally:
            self._lock.release()

    def _complete_oldest(self) -> None:
        try:
            self._window.complete_oldest()
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _fail(self, error: BaseException) -> None:
        """Ends the channel for `error`. An error that is no Exception, such as KeyboardInterrupt,
        may strike anywhere. Then nobody knows any more which message belongs to which handle."""
        told = named(error)
        failure = error if isinstance(error, Exception) else self._stopped(told)
        for failed in self._window.posts:
            failed.finish(failure)
        self._window.posts.clear()
        if not isinstance(error, BLSError):  # the code that raises a BLSError tells the others
            self.channel.poison(told)

    def _stopped(self, reason: str) -> PoisonedError:
        channel = self.channel
        lag = max(0, channel.native.posted - 1 - channel.native.completed)
        rank = channel.names.of(channel.rank)
        return PoisonedError(
            f"channel '{channel.name}' on {rank}, sequence {channel.native.completed}, lag {lag}: "
            f"stopped because {rank} failed: {reason}"
        )


class CallWork(dist.Work):
    """Handle of one call.

    The output is written by `wait`, by an `is_completed` that returns True, or when a later handle
    of the group is completed: no thread writes it in the background. The group's deadline counts,
    not the `timeout` of a single call.
    """

    def __init__(
        self,
        queue: CallQueue,
        receive: Receive,
        inputs: Sequence[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        super().__init__()
        self.finished = False
        self._queue = queue
        self._receive = receive
        self._inputs: Sequence[torch.Tensor] = inputs
        self._outputs = outputs
        self._error: Exception | None = None
        self._future: Future[list[torch.Tensor]] | None = None

    @property
    def channel(self) -> BoundedLagChannel:
        """The channel of the group."""
        return self._queue.channel

    def receive(self, arrival: _native.Arrival) -> None:
        """Writes the output; see UnderWay."""
        self._receive(arrival)
        self.finish(None)

    def finish(self, error: Exception | None) -> None:
        """Frees the inputs and makes `wait` return, or raise `error`."""
        self._error = error
        self._inputs = ()
        self.finished = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the output is there.

        Raises:
            BLSError: the channel's error for the failure, with its type and text.
        """
        if not self.finished:
            self._queue.complete(self)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns whether `wait` would not have to wait: the output is there, or `wait` raises."""
        if not self.finished:
            self._queue.complete_if_ready(self)
        return self.finished

    def is_success(self) -> bool:
        """Returns whether the output is there."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Returns the error that `wait` would raise; None if there is none or it is not known
        yet."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Returns the output tensors, written or not."""
        return self._outputs

    def get_future(self) -> "Future[list[torch.Tensor]]":
        """Returns a future of the output tensors. A thread waits to complete it, so that it
        completes even if nobody looks at it."""
        if self._future is None:
            self._future = Future()
            if self.finished:
                self._complete_future(self._future)
            else:
                threading.Thread(
                    target=self._complete_future,
                    args=(self._future,),
                    name="torchrec_bls future",
                    daemon=True,
                ).start()
        return self._future

    def _complete_future(self, future: "Future[list[torch.Tensor]]") -> None:
        try:
            self.wait()
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(self._outputs)

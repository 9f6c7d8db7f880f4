"""All-reduces of a group through their own channel, one after the other."""

import threading
import weakref
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from torchrec_bls import _native
from torchrec_bls.collective.channel import BoundedLagChannel, check_not_abandoned, in_range
from torchrec_bls.errors import BLSError, named

#: Dtypes of `Element` in csrc/messages/reduction.h.
ELEMENTS = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
}
#: Numbers of `Reduction` there.
REDUCTIONS = {
    dist.ReduceOp.SUM: 0,
    dist.ReduceOp.AVG: 1,
    dist.ReduceOp.MAX: 2,
    dist.ReduceOp.MIN: 3,
}
# Large enough that waiting for the other ranks is a small part of its time. Small enough that the
# slots of a few ranks stay in a core's cache.
SLOT_BYTES = 64 << 10


def reduction_of(tensors: list[torch.Tensor], operation: Any) -> int | None:
    """Returns the number of the reduction if the channel can do it for such tensors, else None.

    Ranks that call alike get the same result: it depends on nothing else.
    """
    tensor, *others = tensors
    strided = tensor.is_cpu and tensor.layout == torch.strided
    if others or not strided or tensor.dtype not in ELEMENTS:
        return None
    reduction = REDUCTIONS.get(operation.op)
    averages = reduction == REDUCTIONS[dist.ReduceOp.AVG]
    return None if averages and not tensor.is_floating_point() else reduction


class AllReduces:
    """The all-reduces of one rank in a group, in the order of their calls.

    If a caller waits for its result at once and no other call is under way, its own thread does the
    work. One thread of this object does all other calls, so that they go on while their callers
    do something else.

    Args:
        channel: channel for these all-reduces alone, with the bound `_native.ALL_REDUCE_POSTS` - 1.
    """

    def __init__(self, channel: BoundedLagChannel) -> None:
        self.channel = channel
        self._order = threading.Lock()
        self._finishing = threading.Condition()
        # Calls for the thread. Each keeps its tensor only for its caller.
        self._newest: weakref.ref[AllReduceWork] | None = None
        self._closed = False
        self._queue: SimpleQueue[AllReduceWork | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stop = weakref.finalize(self, self._queue.put, None)

    def start(self, tensor: torch.Tensor, reduction: int, waits: bool) -> "AllReduceWork":
        """Begins an all-reduce; the first call that does not wait starts the thread.

        Args:
            tensor: tensor of a dtype in ELEMENTS; the result replaces it.
            reduction: one of REDUCTIONS.
            waits: whether the caller waits for the result at once.

        Raises:
            ChannelClosedError: this is a forked child, which has no such thread.
        """
        check_not_abandoned(self.channel)
        work = AllReduceWork(self.channel, tensor, reduction, self._finishing)
        try:
            with self._order:
                if self._closed or (waits and self._is_idle()):  # a closed one fails at once
                    work.run()
                else:
                    self._enqueue(work)
        except BaseException as error:  # from a signal's handler: the others count on this call
            self.channel.poison(named(error))
            raise
        return work

    def _is_idle(self) -> bool:
        newest = None if self._newest is None else self._newest()
        return newest is None or newest.finished

    def _enqueue(self, work: "AllReduceWork") -> None:
        self._queue.put(work)
        self._newest = weakref.ref(work)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run_all, args=(self._queue,), name="torchrec_bls all-reduce", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Closes the channel and ends the thread. Calls under way fail."""
        try:
            self.channel.close()
        finally:
            with self._order:  # so that nothing follows the end of the queue
                self._closed = True
                self._stop()


def _run_all(queue: "SimpleQueue[AllReduceWork | None]") -> None:
    while (work := queue.get()) is not None:
        work.run()
        del work  # and its tensor, before the next call comes


class AllReduceWork(dist.Work):
    """Handle of one all-reduce. The deadline of the group counts, and not the `timeout` of a
    single call."""

    def __init__(
        self,
        channel: BoundedLagChannel,
        tensor: torch.Tensor,
        reduction: int,
        finishing: threading.Condition,
    ) -> None:
        super().__init__()
        self.finished = False
        self._channel = channel
        self._tensor = tensor
        self._reduction = reduction
        self._finishing = finishing  # shared by all handles of the group
        self._error: BaseException | None = None
        self._future: Future[list[torch.Tensor]] | None = None
        self._completes: Future[None] | None = None  # the future that completes `_future`

    def run(self) -> None:
        """Does the all-reduce. `wait` raises its errors."""
        tensor = self._tensor
        try:
            flat = tensor.resolve_neg().contiguous()  # its memory has the values
            channel = self._channel
            in_range(
                channel, "all-reduce", _native.all_reduce, channel.native, flat, self._reduction
            )
            if flat is not tensor:
                tensor.detach().copy_(flat)  # a parameter, perhaps
        except BaseException as error:
            self._error = error
            if not isinstance(error, BLSError):  # the code that raises a BLSError tells the others
                self._channel.poison(named(error))
        with self._finishing:
            self.finished = True
            self._finishing.notify_all()
        if self._completes is not None:
            self._completes.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the tensor has the result.

        Raises:
            BLSError: the channel's error for the failure, with its type and text.
        """
        try:
            if not self.finished:
                with self._finishing:
                    self._finishing.wait_for(lambda: self.finished)
        except BaseException as error:  # from a signal's handler
            self._channel.poison(named(error))
            raise
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns whether `wait` would return or raise without waiting."""
        return self.finished

    def is_success(self) -> bool:
        """Returns whether the tensor has the result."""
        return self.finished and self._error is None

    def exception(self) -> BaseException | None:
        """Returns the error that `wait` would raise; None if there is none or it is not known
        yet."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Returns the tensor, reduced or not."""
        return [self._tensor]

    def get_future(self) -> "Future[list[torch.Tensor]]":
        """Returns a future of the tensor. Its errors are RuntimeErrors with type and text of the
        error that `wait` raises. C++ does not see other Python errors of a future:
        DistributedDataParallel would take them for a result."""
        with self._finishing:
            if self._future is not None:
                return self._future
            completes: Future[None] = Future()
            self._future = completes.then(self._result_or_error)
            if not self.finished:
                self._completes = completes
                return self._future
        completes.set_result(None)
        return self._future

    def _result_or_error(self, _: object) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return [self._tensor]

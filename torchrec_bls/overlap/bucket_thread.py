"""A thread that reduces buckets of gradients, one after the other."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.futures import Future


class BucketThread:
    """Processes buckets in the order in which DistributedDataParallel hands them over, while the
    backward goes on.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)

    def submit(self, buffer: torch.Tensor, reduce: Callable[[], None]) -> "Future[torch.Tensor]":
        """Returns a future of `buffer`, which is complete when `reduce` has written it.

        An error of `reduce` ends the backward as a RuntimeError with its type and text. C++ does
        not see other Python errors of a future: DistributedDataParallel would take them for the
        gradients (torch 2.13).

        On a GPU `reduce` runs on the stream of the calling thread, behind the gradients. Whoever
        waits for the future has its own stream wait for that stream.
        """
        devices: list[int | str | torch.device] = [buffer.device] if buffer.is_cuda else []
        reduced: Future[torch.Tensor] = Future(devices=devices)
        stream = _stream_of(buffer)
        errors: list[BaseException] = []

        def result(_: object) -> torch.Tensor:
            if errors:
                raise errors[0]
            return buffer

        def run() -> None:
            with stream:
                try:
                    reduce()
                except BaseException as error:
                    errors.append(error)
                # A future waits for what was queued before on the devices of its result alone.
                reduced.set_result(buffer)

        future: Future[torch.Tensor] = reduced.then(result)
        self._thread.submit(run)
        return future


def _stream_of(buffer: torch.Tensor) -> AbstractContextManager[None]:
    """Returns a context in which another thread works on this thread's stream.

    A thread of its own begins with the default stream, which other streams do not wait for.
    """
    if not buffer.is_cuda:
        return nullcontext()
    return torch.cuda.stream(torch.cuda.current_stream(buffer.device))

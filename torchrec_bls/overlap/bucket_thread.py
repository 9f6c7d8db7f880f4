"""A thread that reduces buckets of gradients, one after the other."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

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
        """
        reduced: Future[None] = Future()
        errors: list[BaseException] = []

        def result(_: object) -> torch.Tensor:
            if errors:
                raise errors[0]
            return buffer

        def run() -> None:
            try:
                reduce()
            except BaseException as error:
                errors.append(error)
            reduced.set_result(None)

        future: Future[torch.Tensor] = reduced.then(result)
        self._thread.submit(run)
        return future
